"""What a block reads beside its arguments: parameters, buffers and training flags of its modules.

A later run must find what the first run found. Parameters and the buffers that a block only reads must not have been
written since; where others were put in their places (as `torch.func.functional_call` does), they are put back for the
run, for autograd would have kept them. Buffers that it writes (BatchNorm's statistics, power iterations) get their old
values for the run, in copies that take their place, so that the model's own are written once a step. BatchNorm's
kernels write without counting versions; hence copies are taken of all small buffers, and of those large ones that a
first run was seen to change. A copy of more than 4 KiB of a buffer that the run did not write is let go (a smaller one
may be written between the blocks, by the model or a hook); but only the first run of all compares where that means to
wait for a device: later copies of buffers that lie on one stay, and are right either way.
Attributes that a run changes, such as a count of steps that the block warms up by, are for a later run what that run
found; what the first run of all alone changes, such as that the block has been initialized, stays. Large tensors that a
run replaces are not held for this; where runs begin to do so, all that the block returns is compared.
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
from ..base.patched_forward import TAKEN
from . import sharded
from .buffer_copies import copied, with_neighbours

SMALL_BUFFER_BYTES = 64 * 1024

#: What a module has before its class gives it anything.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))

#: `vars` of a module. Its own way there, past all classes of modules, is several times as short where caches are cold.
attributes_of: Callable[[nn.Module], dict[str, Any]] = vars(nn.Module)["__dict__"].__get__

_parameters_of, _buffers_of = operator.itemgetter("_parameters"), operator.itemgetter("_buffers")
_modules_of = operator.itemgetter("_modules")
_values_of = operator.methodcaller("values")

_ABSENT = object()  # in place of what an attribute stands for that is not there
_LET_GO = object()  # in place of what takes much to hold
_NEVER_LET_GO = OF_EVERY_MODULE | TAKEN
_RUNS_TO_LEARN = 2  # which show what runs of a block change; what was not right then would have shown itself
LARGE_BYTES = 4096  # of a tensor that is no loss, nor a statistic
_ITEMS_NOTED = 100
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))

_Registry = dict[str, torch.Tensor | None]
_Place = tuple[int, str]  # an attribute, with the index of its module among the parts
_Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by index of a buffer: the buffer, and its value before a run


class BlockState:
    """Where a block's parameters, buffers and flags are; holds no module, so that models are freed as ever."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._roots = list(map(weakref.ref, modules))
        self.brings_back = False  # attributes and hooks that others have changed since are brought back, too
        self._look()

    def _look(self) -> None:
        """Finds the parts of the modules; anew when some were replaced."""
        self._prefixes: list[str] = []
        self._parts: list[weakref.ref[nn.Module]] = []
        self._changing: set[int] | None = None  # buffers that runs write; None before the first run
        self._runs = 0  # that were looked at
        self._unnoted: set[_Place] = set()  # attributes that first runs have changed, and that take much to note
        self._replaced: set[_Place] = set()  # attributes that runs have given what takes much to hold
        self.is_steady = False  # the latest run has changed no attribute
        self.fills = False  # runs change what is in containers, objects or small tensors among attributes
        for number, root in enumerate(self._roots):
            module = root()
            prefix = "" if len(self._roots) == 1 else str(number)
            for name, part in () if module is None else module.named_modules(prefix=prefix):
                self._prefixes.append(name)
                self._parts.append(weakref.ref(part))
        self.children = children_of(self.attributes())

    def replaced_part(self, children: list[int]) -> str | None:
        """The name of the first part that is not as in the list of all children that there was."""
        names = [f"{prefix}.{key}".lstrip(".") for prefix, part in zip(self._prefixes, self.modules(), strict=False)
                 for key in part._modules]  # fmt: skip
        now = children_of(self.attributes())
        if now == children:
            return None
        return next((n for n, found, before in zip(names, now, children, strict=False) if found != before), "one")

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

    def before(self) -> Before:
        """What a run finds: copies of the buffers that it may write, parameters and buffers as they are now."""
        modules = [part for reference in self._parts if (part := reference()) is not None]
        attributes = list(map(attributes_of, modules))
        if len(modules) != len(self._parts) or children_of(attributes) != self.children:
            self._look()
            return self.before()
        parameters = parameters_in(attributes)
        buffers = list(itertools.chain.from_iterable(map(_values_of, filter(None, map(_buffers_of, attributes)))))
        copies: _Copies = {}
        names = list(map(dict.copy, attributes))
        let_go = self._let_go(names) if self._runs == 0 or self._replaced else {}
        if not buffers:
            return Before(modules, attributes, self.children, parameters, buffers, [], copies, names, let_go)
        changing = [i for i, buffer in enumerate(buffers) if buffer is not None and self._may_change(i, buffer)]
        chosen = [(i, buffers[i]) for i in sorted(with_neighbours(changing, buffers))]
        made = copied([buffer for _, buffer in chosen])
        copies.update({i: (buffer, copy) for (i, buffer), copy in zip(chosen, made, strict=True)})
        versions = _compat.versions(buffers)
        return Before(modules, attributes, self.children, parameters, buffers, versions, copies, names, let_go)

    def _let_go(self, names: Sequence[dict[str, Any]]) -> dict[_Place, int]:
        """Takes out what a run may replace and what would take much, held until the run ends; its identities. What runs
        have replaced has none (0): what comes may have the identity of what has gone.
        """
        places = self._replaced.copy()  # another thread may add to it
        if self._runs == 0:
            places = {(index, name) for index, own in enumerate(names) for name in own.keys() - _NEVER_LET_GO}
        heavy = [(index, name) for index, name in places if not is_light(names[index].get(name))]
        found = {(index, name): id(names[index].pop(name)) for index, name in heavy}
        return found if self._runs == 0 else dict.fromkeys(found, 0)

    def _note_changes(self, before: Before) -> None:
        """What of the attributes a run has changed, of which a later run is to find what this one found. What a first
        run alone changes was made once and for all, but for what it made where there was nothing.
        """
        assert before.names is not None
        changed = dict(_changed(before.attributes, before.names))
        now = {place: before.attributes[place[0]].get(place[1]) for place in changed.keys() | before.let_go.keys()}
        for place, identity in before.let_go.items():
            if id(now[place]) == identity:
                changed.pop(place, None)
            else:
                changed[place] = _LET_GO
        self._replaced.update(place for place in changed if not is_light(now[place]))
        self.is_steady = not changed
        if self._runs == 0:
            changed = {place: old for place, old in changed.items() if old is None or old is _ABSENT}
        before.names, before.changed = None, {place: old for place, old in changed.items() if is_light(old)}
        unnoted = changed.keys() - before.changed.keys()
        if self._runs < _RUNS_TO_LEARN:
            self._unnoted |= unnoted
        before.is_in_doubt = not unnoted <= self._unnoted
        self._runs += 1

    def copy_all_buffers(self) -> None:
        """From now on, before every run: some may be written in ways that torch does not count."""
        self._changing = set(range(len(self.buffers())))

    def _may_change(self, index: int, buffer: torch.Tensor) -> bool:
        if self._changing is None or index in self._changing:
            return True
        return buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES

    def after(self, before: Before) -> Record:
        """What a run left, and what it must find when it is run again."""
        if before.names is not None:
            self._note_changes(before)
        if self._changing is None:
            self._changing = {index for index in before.copies if self._is_written(index, before)}
        elif before.buffers:
            now = _compat.versions(before.buffers)
            self._changing |= {index for index, version in enumerate(before.versions) if now[index] != version}
        if before.copies:
            self._changing = with_neighbours(self._changing, before.buffers)
            unwritten = [index for index in before.copies.keys() - self._changing if self._is_let_go(index, before)]
            staying = with_neighbours(before.copies.keys() - unwritten, before.buffers)
            for index in before.copies.keys() - staying:
                del before.copies[index]
        return Record(self, before)

    def _is_let_go(self, index: int, before: Before) -> bool:
        """Whether a copy that the run turned out not to need takes so much that the buffer is compared to learn it;
        small ones may be written behind the run.
        """
        buffer = before.copies[index][0]
        is_large = memory.storage_bytes(buffer) > LARGE_BYTES
        return is_large and memory.is_at_hand(buffer) and not self._is_written(index, before)

    def _is_written(self, index: int, before: Before) -> bool:
        """Whether a run wrote or replaced a buffer, be it with what was there: that counts as a version, too."""
        (registry, key), (buffer, copy) = self.buffers()[index], before.copies[index]
        is_counted = _compat.version(buffer) != before.versions[index]
        return is_counted or registry.get(key) is not buffer or not same_numbers(buffer, copy)


@dataclass(slots=True)
class Before:
    """A block before a run: its parts, buffers with their versions, and copies of those that the run may write."""

    modules: Sequence[nn.Module]
    attributes: Sequence[dict[str, Any]]
    children: list[int]  # the identities of the parts that are registered in them
    parameters: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor | None]
    versions: list[int]
    copies: _Copies
    names: list[dict[str, Any]] | None = None  # what the attributes stand for; None after the run
    let_go: dict[_Place, int] = field(default_factory=dict)  # identities of what is left out of that
    changed: dict[_Place, Any] = field(default_factory=dict)  # of what the run has changed: what it found
    is_in_doubt: bool = False  # the run has changed what is not noted, and others have not
    addresses: list[int] | None = None  # of its parameters, if they are known
    flags: list[bool] | None = None  # of training, the same


class Record:
    """What one run of a block found, for its later runs."""

    __slots__ = ("_addresses", "_before", "_flags", "_state", "_versions")

    def __init__(self, state: BlockState, before: Before) -> None:
        self._state, self._before = state, before
        self._versions, self._addresses = _compat.versions(before.parameters), before.addresses  # and of buffers
        self._flags = [part.training for part in before.modules] if before.flags is None else before.flags
        if self._addresses is None and not sharded.is_any(before.modules):
            own = [*before.parameters, *before.buffers] if before.buffers else before.parameters
            self._addresses = _compat.addresses(own)

    @property
    def is_in_doubt(self) -> bool:
        """Whether a later run may find something else than the run did."""
        return self._before.is_in_doubt

    def difference(self) -> str | None:
        """What is no longer as the first run found it, in words; None if all is."""
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
        found = [part.training for part in modules]
        index = next(i for i, flag in enumerate(self._flags) if found[i] != flag)
        return f"the training flag of its module '{self._state.module_name(index)}' was changed"

    def parameter(self, index: int) -> torch.Tensor | None:
        """A parameter as the run found it; None if it was written since."""
        found = self._before.parameters[index]
        assert found is not None
        return found if _compat.version(found) == self._versions[index] and not self._is_moved(index, found) else None

    def _is_moved(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor was given other data (`parameter.data = ...`), which counts as no version."""
        return self._addresses is not None and _compat.addresses((tensor,)) != self._addresses[index : index + 1]

    def _first_moved(self) -> str | None:
        before, count = self._before, len(self._before.parameters)
        for index, tensor in enumerate((*before.parameters, *before.buffers)):
            if tensor is not None and index - count not in before.copies and self._is_moved(index, tensor):
                name = self._state.buffer_name(index - count) if index >= count else self._state.parameter_name(index)
                return f"{'buffer' if index >= count else 'parameter'} '{name}'"
        return None

    def buffer(self, index: int) -> torch.Tensor | None:
        """A buffer as the run found it: the copy, if one was taken; None if it was written since."""
        if index in self._before.copies:
            return self._before.copies[index][1]
        found = self._before.buffers[index]
        assert found is not None
        is_moved = self._is_moved(len(self._before.parameters) + index, found)
        return found if _compat.version(found) == self._before.versions[index] and not is_moved else None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[list[torch.Tensor]]:
        """The body finds the parameters and buffers that the run found, also where others were put in their places; of
        the buffers that the block writes the old values, in tensors of their own, which are given to the body.
        Attributes that the run has changed are as it found them. Whoever runs the body puts attributes back after it.
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
            for (index, name), found in before.changed.items():
                before.attributes[index][name] = found
                if found is _ABSENT:
                    del before.attributes[index][name]
            yield list(shared.values())
        finally:
            for registry, key, tensor in replaced:
                registry[key] = tensor


def _changed(attributes: Sequence[dict[str, Any]], names: Sequence[dict[str, Any]]) -> Iterator[tuple[_Place, Any]]:
    """The attributes that no longer stand for what they did, with what that was."""
    for index, (now, before) in enumerate(zip(attributes, names, strict=True)):
        if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
            continue
        now = dict.copy(now)
        for name in (now.keys() | before.keys()) - TAKEN:
            found = before.get(name, _ABSENT)
            if now.get(name, _ABSENT) is not found:
                yield (index, name), found


def is_light(value: Any, depth: int = 2) -> bool:
    """Whether to hold it until the backward takes next to no memory, and keeps no graph."""
    kind = type(value)
    if kind in _PLAIN or value is _ABSENT:
        return True
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and memory.storage_bytes(value) <= LARGE_BYTES
    if kind in (tuple, list, dict) and depth > 0 and len(value) <= _ITEMS_NOTED:
        return all(is_light(item, depth - 1) for item in (value.values() if kind is dict else value))
    return False


def parameters_in(attributes: Sequence[dict[str, Any]]) -> list[torch.Tensor | None]:
    """The parameters that are registered in modules with these attributes."""
    return list(itertools.chain.from_iterable(map(_values_of, filter(None, map(_parameters_of, attributes)))))


def children_of(attributes: Iterable[dict[str, Any]]) -> list[int]:
    """The identities of the parts that are registered in modules with these attributes."""
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
    """Whether all values are the same; one that is not a number equals itself. Quicker than `same_bits`."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(first, second)) or same_bits(first, second)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """The same, and zeros have the same signs."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_quantized:
        return bool(torch.equal(first, second))
    return bool(torch.equal(_bytes(first), _bytes(second)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
