"""State of a block's modules that a recomputation must read as the forward did: parameters, buffers, attributes, flags.

*Parameters, and buffers that the block only reads*, must not have been written since the forward. They may have been
replaced, as `torch.func.functional_call` does. Then the recomputation reads the tensors of the forward.

*Buffers that the block writes* (BatchNorm's statistics, power iterations). The recomputation gets copies with the old
values. So the model's own buffers are written once a step. BatchNorm's kernels write without counting versions. So all
small buffers are copied, and those large ones that a run was seen to change. After the run, a copy of more than 4 KiB
of a buffer that was not written is dropped. Smaller copies stay, because the model or a hook may write the buffer
between the blocks. To compare buffers on a device means to wait for it, so only the very first run does: later copies
of such buffers stay, which is right in either case.

*Attributes that the block changes*, such as a count of warm-up steps. The recomputation gets the values that the
forward read. What only the very first run changes, such as an "initialized" flag, stays changed. Large tensors that a
run replaces are not held for this. If runs begin to replace such tensors, all outputs of the block are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ..base import _compat, memory
from ..base.patched_forward import PATCHED_NAMES
from . import sharded
from .buffer_copies import copied, with_neighbours

SMALL_BUFFER_BYTES = 64 * 1024

#: What a module has before its class gives it anything.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # which Module.compile sets

#: `vars` of a module. Its own way there, past all classes of modules, is several times as short where caches are cold.
attributes_of: Callable[[nn.Module], dict[str, Any]] = vars(nn.Module)["__dict__"].__get__

_parameters_of, _buffers_of = operator.itemgetter("_parameters"), operator.itemgetter("_buffers")
_modules_of = operator.itemgetter("_modules")
_values_of = operator.methodcaller("values")

_ABSENT = object()  # the value of an attribute that does not exist
_NOT_HELD = object()  # the value of an attribute that is too large to hold
_ALWAYS_HELD = OF_EVERY_MODULE | PATCHED_NAMES
_RUNS_TO_LEARN = 2  # the first runs show which attributes a block changes; wrong results would have shown in them
LARGE_BYTES = 4096  # least size of a tensor that is neither a loss nor a statistic
_ITEMS_COMPARED = 100
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))

_Registry = dict[str, torch.Tensor | None]
_Place = tuple[int, str]  # an attribute, with the index of its module among the parts
_Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by index of a buffer: the buffer, and its value before a run


class BlockState:
    """The places of a block's parameters, buffers and flags. It has only weak references to modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._roots = list(map(weakref.ref, modules))
        self.restores_attributes = False  # attributes and hooks that others change after the forward are restored, too
        self._find_submodules()

    def _find_submodules(self) -> None:
        """Finds the submodules: first, and whenever some were replaced."""
        self._prefixes: list[str] = []
        self._parts: list[weakref.ref[nn.Module]] = []
        self._changing: set[int] | None = None  # buffers that runs write; None before the first run
        self._runs = 0  # number of runs so far
        self._unrestored: set[_Place] = set()  # attributes that the first runs changed, and that are too large to hold
        self._replaced: set[_Place] = set()  # attributes to which runs have assigned something too large to hold
        self.is_steady = False  # the latest run has changed no attribute
        self.fills = False  # runs change the contents of containers, objects or small tensors in attributes
        for number, root in enumerate(self._roots):
            module = root()
            prefix = "" if len(self._roots) == 1 else str(number)
            for name, part in () if module is None else module.named_modules(prefix=prefix):
                self._prefixes.append(name)
                self._parts.append(weakref.ref(part))
        self.children = children_of(self.attributes())

    def replaced_part(self, children: list[int]) -> str | None:
        """The name of the first submodule that was replaced since; None if none was."""
        names = [f"{prefix}.{key}".lstrip(".") for prefix, part in zip(self._prefixes, self.modules(), strict=False)
                 for key in part._modules]  # fmt: skip
        now = children_of(self.attributes())
        if now == children:
            return None
        return next((n for n, child, before in zip(names, now, children, strict=False) if child != before), "one")

    def modules(self) -> list[nn.Module]:
        """The modules of the block."""
        return [part for reference in self._parts if (part := reference()) is not None]

    def attributes(self) -> list[dict[str, Any]]:
        """Their attributes."""
        return list(map(attributes_of, self.modules()))

    def parameters(self) -> list[torch.Tensor | None]:
        """The parameters that are registered now."""
        return [parameter for part in self.modules() for parameter in part._parameters.values()]

    def parameter_places(self) -> list[tuple[_Registry, str]]:
        """Where each parameter is registered, and by which name."""
        places = [(part._parameters, key) for part in self.modules() for key in part._parameters]
        return cast("list[tuple[_Registry, str]]", places)

    def buffers(self) -> list[tuple[_Registry, str]]:
        """Where each buffer is registered, and by which name."""
        return [(part._buffers, key) for part in self.modules() for key in part._buffers]

    def parameter_name(self, index: int) -> str:
        """The name of a parameter within the block."""
        return self._name([list(part._parameters) for part in self.modules()], index)

    def buffer_name(self, index: int) -> str:
        """The name of a buffer within the block."""
        return self._name([list(part._buffers) for part in self.modules()], index)

    def module_name(self, index: int) -> str:
        """The name of a module within the block."""
        return self._prefixes[index] or type(self.modules()[index]).__name__

    def _name(self, keys: list[list[str]], index: int) -> str:
        names = [
            f"{prefix}.{key}" if prefix else key
            for prefix, part in zip(self._prefixes, keys, strict=True)
            for key in part
        ]
        return names[index]

    def before(self) -> StateBefore:
        """Records the state before a run: parameters and buffers, and copies of the buffers that the run may write."""
        modules = [part for reference in self._parts if (part := reference()) is not None]
        attributes = list(map(attributes_of, modules))
        if len(modules) != len(self._parts) or children_of(attributes) != self.children:
            self._find_submodules()
            return self.before()
        parameters = parameters_in(attributes)
        buffers = list(itertools.chain.from_iterable(map(_values_of, filter(None, map(_buffers_of, attributes)))))
        copies: _Copies = {}
        names = list(map(dict.copy, attributes))
        released = self._release_large(names) if self._runs == 0 or self._replaced else {}
        if not buffers:
            return StateBefore(modules, attributes, self.children, parameters, buffers, [], copies, names, released)
        changing = [i for i, buffer in enumerate(buffers) if buffer is not None and self._may_change(i, buffer)]
        chosen = [(i, buffers[i]) for i in sorted(with_neighbours(changing, buffers))]
        made = copied([buffer for _, buffer in chosen])
        copies.update({i: (buffer, copy) for (i, buffer), copy in zip(chosen, made, strict=True)})
        versions = _compat.versions(buffers)
        return StateBefore(modules, attributes, self.children, parameters, buffers, versions, copies, names, released)

    def _release_large(self, names: Sequence[dict[str, Any]]) -> dict[_Place, int]:
        """Removes large attributes that a run may replace from `names`, so that they are not held until the run ends.

        Returns their identities; 0 for attributes that runs have replaced before, because a new object may have the
        identity of a freed one.
        """
        places = self._replaced.copy()  # another thread may add to it
        if self._runs == 0:
            places = {(index, name) for index, own in enumerate(names) for name in own.keys() - _ALWAYS_HELD}
        heavy = [(index, name) for index, name in places if not is_light(names[index].get(name))]
        identities = {(index, name): id(names[index].pop(name)) for index, name in heavy}
        return identities if self._runs == 0 else dict.fromkeys(identities, 0)

    def _record_changes(self, before: StateBefore) -> None:
        """Records which attributes a run has changed: a recomputation gets the values before the run.

        What only the first run changes stays changed, except attributes that did not exist or were None before.
        """
        assert before.names is not None
        changed = dict(_changed(before.attributes, before.names))
        now = {place: before.attributes[place[0]].get(place[1]) for place in changed.keys() | before.released.keys()}
        for place, identity in before.released.items():
            if id(now[place]) == identity:
                changed.pop(place, None)
            else:
                changed[place] = _NOT_HELD
        self._replaced.update(place for place in changed if not is_light(now[place]))
        self.is_steady = not changed
        if self._runs == 0:
            changed = {place: old for place, old in changed.items() if old is None or old is _ABSENT}
        before.names, before.changed = None, {place: old for place, old in changed.items() if is_light(old)}
        unrestored = changed.keys() - before.changed.keys()
        if self._runs < _RUNS_TO_LEARN:
            self._unrestored |= unrestored
        before.is_in_doubt = not unrestored <= self._unrestored
        self._runs += 1

    def copy_all_buffers(self) -> None:
        """Copies all buffers before every run from now on: some may be written without a version count."""
        self._changing = set(range(len(self.buffers())))

    def _may_change(self, index: int, buffer: torch.Tensor) -> bool:
        if self._changing is None or index in self._changing:
            return True
        return buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES

    def after(self, before: StateBefore) -> Record:
        """Called after a run: the record of the state that a recomputation must read."""
        if before.names is not None:
            self._record_changes(before)
        if self._changing is None:
            self._changing = {index for index in before.copies if self._is_written(index, before)}
        elif before.buffers:
            now = _compat.versions(before.buffers)
            self._changing |= {index for index, version in enumerate(before.versions) if now[index] != version}
        if before.copies:
            self._changing = with_neighbours(self._changing, before.buffers)
            unwritten = [index for index in before.copies.keys() - self._changing if self._is_released(index, before)]
            staying = with_neighbours(before.copies.keys() - unwritten, before.buffers)
            for index in before.copies.keys() - staying:
                del before.copies[index]
        return Record(self, before)

    def _is_released(self, index: int, before: StateBefore) -> bool:
        """Whether a copy is dropped: it is large, and a comparison shows that the run did not write the buffer.

        Small copies stay, because their buffers may be written after the run.
        """
        buffer = before.copies[index][0]
        is_large = memory.storage_bytes(buffer) > LARGE_BYTES
        return is_large and memory.is_at_hand(buffer) and not self._is_written(index, before)

    def _is_written(self, index: int, before: StateBefore) -> bool:
        """Whether a run wrote or replaced a buffer, even with equal values: that counts as a new version, too."""
        (registry, key), (buffer, copy) = self.buffers()[index], before.copies[index]
        is_counted = _compat.version(buffer) != before.versions[index]
        return is_counted or registry.get(key) is not buffer or not same_numbers(buffer, copy)


@dataclass(slots=True)
class StateBefore:
    """The state of a block before a run: submodules, tensors and their versions, copies of buffers it may write."""

    modules: Sequence[nn.Module]
    attributes: Sequence[dict[str, Any]]
    children: list[int]  # the identities of the submodules that are registered in them
    parameters: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor | None]
    versions: list[int]  # of the buffers
    copies: _Copies
    names: list[dict[str, Any]] | None = None  # values of the attributes; None after the run
    released: dict[_Place, int] = field(default_factory=dict)  # identities of large values that `names` leaves out
    changed: dict[_Place, Any] = field(default_factory=dict)  # attributes that the run changed: their values before it
    is_in_doubt: bool = False  # the run changed large attributes that earlier runs did not change
    addresses: list[int] | None = None  # of the parameters, if they are known
    flags: list[bool] | None = None  # training flags, if they are known


class Record:
    """The state that one run of a block read, to check and restore it for the recomputation."""

    __slots__ = ("_addresses", "_before", "_flags", "_state", "_versions")

    def __init__(self, state: BlockState, before: StateBefore) -> None:
        self._state, self._before = state, before
        self._versions, self._addresses = _compat.versions(before.parameters), before.addresses  # and of buffers
        self._flags = [part.training for part in before.modules] if before.flags is None else before.flags
        if self._addresses is None and not sharded.is_any(before.modules):
            own = [*before.parameters, *before.buffers] if before.buffers else before.parameters
            self._addresses = _compat.addresses(own)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the recomputation may read other state than the run did."""
        return self._before.is_in_doubt

    def difference(self) -> str | None:
        """The change since the run, in words; None if there is none."""
        before, state, modules = self._before, self._state, self._state.modules()
        replaced = state.replaced_part(before.children)
        if replaced is not None:
            return f"its part '{replaced}' was replaced"
        if len(state.parameters()) != len(before.parameters) or len(state.buffers()) != len(before.buffers):
            return "a parameter or buffer was added or removed"
        written = _first_written(before.parameters, self._versions)
        if written is not None:
            return f"its parameter '{state.parameter_name(written)}' was modified in place"
        written = _first_written(before.buffers, before.versions, before.copies) if before.buffers else None
        if written is not None:
            return f"its buffer '{state.buffer_name(written)}' was modified in place"
        moved = self._first_moved()
        if moved is not None:
            return f"its {moved} was given other data"
        if len(modules) != len(self._flags):
            return "a part was added or removed"
        return None if [part.training for part in modules] == self._flags else self._differing_flag(modules)

    def _differing_flag(self, modules: Sequence[nn.Module]) -> str:
        flags = [part.training for part in modules]
        index = next(i for i, flag in enumerate(self._flags) if flags[i] != flag)
        return f"the training flag of its module '{self._state.module_name(index)}' was changed"

    def parameter(self, index: int) -> torch.Tensor | None:
        """A parameter as the run read it; None if it was written since."""
        parameter = self._before.parameters[index]
        assert parameter is not None
        return (
            parameter
            if _compat.version(parameter) == self._versions[index] and not self._is_moved(index, parameter)
            else None
        )

    def _is_moved(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor was given other data (`parameter.data = ...`), which does not change its version."""
        return self._addresses is not None and _compat.addresses((tensor,)) != self._addresses[index : index + 1]

    def _first_moved(self) -> str | None:
        before, count = self._before, len(self._before.parameters)
        for index, tensor in enumerate((*before.parameters, *before.buffers)):
            if tensor is not None and index - count not in before.copies and self._is_moved(index, tensor):
                name = self._state.buffer_name(index - count) if index >= count else self._state.parameter_name(index)
                return f"{'buffer' if index >= count else 'parameter'} '{name}'"
        return None

    def buffer(self, index: int) -> torch.Tensor | None:
        """A buffer as the run read it: the copy, if there is one; None if it was written since."""
        if index in self._before.copies:
            return self._before.copies[index][1]
        buffer = self._before.buffers[index]
        assert buffer is not None
        is_moved = self._is_moved(len(self._before.parameters) + index, buffer)
        return buffer if _compat.version(buffer) == self._before.versions[index] and not is_moved else None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[list[torch.Tensor]]:
        """Restores, for the body, the state that the run read.

        Parameters and buffers are those of the run, also where others were put in their places. Buffers that the block
        writes are copies with the old values; these are yielded. Attributes that the run changed have their values
        before the run. The caller restores attributes after the body.
        """
        before, state = self._before, self._state
        copies = {id(buffer): copy for buffer, copy in before.copies.values()}  # registered twice, it stays one tensor
        shared = dict(zip(copies, copied(list(copies.values())), strict=True))
        buffers = [
            shared[id(buffer)] if index in before.copies else buffer for index, buffer in enumerate(before.buffers)
        ]
        places = [*state.parameter_places(), *state.buffers()]
        replaced: list[tuple[_Registry, str, torch.Tensor | None]] = []
        try:
            for (registry, key), tensor in zip(places, [*before.parameters, *buffers], strict=True):
                if registry[key] is not tensor:
                    replaced.append((registry, key, registry[key]))
                    registry[key] = tensor
            for (index, name), value in before.changed.items():
                before.attributes[index][name] = value
                if value is _ABSENT:
                    del before.attributes[index][name]
            yield list(shared.values())
        finally:
            for registry, key, tensor in replaced:
                registry[key] = tensor


def _changed(attributes: Sequence[dict[str, Any]], names: Sequence[dict[str, Any]]) -> Iterator[tuple[_Place, Any]]:
    """The attributes whose values have changed, with the values before."""
    for index, (now, before) in enumerate(zip(attributes, names, strict=True)):
        if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
            continue
        now = dict.copy(now)
        for name in (now.keys() | before.keys()) - PATCHED_NAMES:
            value = before.get(name, _ABSENT)
            if now.get(name, _ABSENT) is not value:
                yield (index, name), value


def is_light(value: Any, depth: int = 2) -> bool:
    """Whether a value can be held until the backward: it takes almost no memory, and keeps no graph alive."""
    kind = type(value)
    if kind in _PLAIN or value is _ABSENT:
        return True
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and memory.storage_bytes(value) <= LARGE_BYTES
    if kind in (tuple, list, dict) and depth > 0 and len(value) <= _ITEMS_COMPARED:
        return all(is_light(item, depth - 1) for item in (value.values() if kind is dict else value))
    return False


def parameters_in(attributes: Sequence[dict[str, Any]]) -> list[torch.Tensor | None]:
    """The parameters that are registered in modules with these attributes."""
    return list(itertools.chain.from_iterable(map(_values_of, filter(None, map(_parameters_of, attributes)))))


def children_of(attributes: Iterable[dict[str, Any]]) -> list[int]:
    """The identities of the submodules that are registered in modules with these attributes."""
    return list(map(id, itertools.chain.from_iterable(map(_values_of, filter(None, map(_modules_of, attributes))))))


def _first_written(
    tensors: Sequence[torch.Tensor | None], versions: Sequence[int], exempt: Container[int] = ()
) -> int | None:
    """The first of the tensors that was written since these were their versions."""
    now = _compat.versions(tensors)
    if now == versions:
        return None
    return next((i for i, version in enumerate(versions) if now[i] != version and i not in exempt), None)


def same_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all values are equal, NaN equal to itself. Quicker than `same_bits`."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(first, second)) or same_bits(first, second)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all bits are equal: also the signs of zeros."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_quantized:
        return bool(torch.equal(first, second))
    return bool(torch.equal(_bytes(first), _bytes(second)))


def same_results(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """`same_bits` of results of a step: some are None, sparse (gradients of embeddings), or a rank's part (DTensor)."""
    if first is None or second is None:
        return first is second
    if not first.layout == second.layout == torch.strided:
        first, second = first.to_dense(), second.to_dense()
    return same_bits(memory.of_this_rank(first), memory.of_this_rank(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
