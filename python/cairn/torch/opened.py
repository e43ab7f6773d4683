"""Blocks that keep a part of what they save: how a step carries out an option of a stage other than "keep".

A plan says, for each stage that is opened, what to do with every saved tensor under each option, in which order a
backward asks for them, and a digest of the operations that this was found on (`Inside`). It does not say how tensors
are rebuilt: that is recorded here, in the first step that runs the block with arguments of some shapes and types, modes
and attributes, and holds as long as these are the same. In that step every rebuilt tensor is compared in full with what
was dropped; in later ones, on the CPU, a few bytes are.

When in doubt, run it again. If a block turns out to do something else than it did while profiling, if a tensor does not
come out as it was, or what it is rebuilt from is gone, the block is run again as a whole for its backward, as blocks
are that keep nothing, and the step's notes say so. That needs more memory than planned, and is as exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import _compat
from .ambient import Modes, RandomState
from .block_graph import BlockGraph, Recorder
from .block_options import KEEP, MASK
from .holders import ArgumentHolder, FirstRun, Holder, LaterRun, RebuiltHolder
from .rebuild import Program, Quick, Rebuild, compile_program, fingerprint, mask_of
from .state import Before, BlockState
from .tree import Slot, Tree


@dataclasses.dataclass(frozen=True)
class Inside:
    """What a plan says about one opened stage."""

    digest: str  # of the recorded operations
    asked: tuple[int, ...]  # the order in which a backward asked for the saved tensors
    draws: tuple[int, ...]  # random operations come after so many saved tensors
    options: tuple[str, ...]  # decisions, by option; the first keeps everything

    def to_json(self) -> dict[str, Any]:
        fields = {"asked": list(self.asked), "draws": list(self.draws), "options": list(self.options)}
        return {"digest": self.digest, **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Inside:
        return cls(str(data["digest"]), tuple(data["asked"]), tuple(data["draws"]), tuple(data["options"]))


@dataclasses.dataclass
class _Entry:
    """A recorded run and what it holds for; without a graph the block cannot be opened."""

    graph: BlockGraph | None
    reason: str
    constants: Constants
    programs: dict[int, Program] = dataclasses.field(default_factory=dict)


class _Key:
    """A key that is hashed once."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class OpenedBlock:
    """A block of a plan with options other than keeping everything."""

    def __init__(self, inside: Inside, state: BlockState, name: str) -> None:
        self.inside, self.state, self._name = inside, state, name
        self._last: tuple[Any, Any, _Key] | None = None  # the latest arguments, what else counts, and their key
        modules = state.modules()
        known = _recorded.setdefault(modules[0], {}) if modules else {}
        self._entries: dict[Any, _Entry] = known.setdefault((inside, len(modules)), {})

    def key(self, tree: Tree, before: Before, modes: Modes, switches: Any) -> Any:
        """Equal for runs that do the same, as far as one can see before they run; mostly the key of the last one."""
        grads = [p is not None and p.requires_grad for p in before.parameters]
        rest = _leaves_key(tree.leaves), grads, modes, switches
        if self._last is not None and not tree.opaque and tree.shape == self._last[0] and rest == self._last[1]:
            return self._last[2]
        key = _Key((_frozen(tree.shape), rest[0], tuple(grads), modes, switches))
        self._last = None if tree.opaque else (tree.shape, rest, key)
        return key

    def saving(self, option: int, key: Any, devices: Sequence[torch.device]) -> Saving:
        """Prepares a run that saves by an option."""
        entry = self._entries.get(key)
        if entry is not None and not entry.constants.hold():
            entry = None
        if entry is None:
            return _Recording(self, option, key, devices)
        program = self._program(entry, option)
        return _Following(self, option, devices, program, entry.reason)

    def _program(self, entry: _Entry, option: int) -> Program | None:
        if entry.graph is None:
            return None
        if option not in entry.programs:
            decisions, asked = self.inside.options[option], self.inside.asked
            entry.programs[option] = compile_program(entry.graph, decisions, asked, self._name)
        return entry.programs[option]

    def learn(self, key: Any, graph: BlockGraph, constants: Constants) -> None:
        """Takes in a recorded run."""
        reason = graph.closed
        if not reason and not constants.hold():
            reason = "changes an attribute of its own in every run"
        if not reason and (graph.digest() != self.inside.digest or len(graph.packs) != len(self.inside.options[0])):
            reason = "does something else than while it was profiled"
        self._entries[key] = _Entry(None if reason else graph, reason, constants)
        while len(self._entries) > _ENTRIES_KEPT:
            del self._entries[next(iter(self._entries))]

    def program(self, key: Any, option: int) -> tuple[Program | None, str]:
        """The program of an option, or why there is none."""
        entry = self._entries[key]
        try:
            return self._program(entry, option), entry.reason
        except ValueError as error:
            entry.graph, entry.reason = None, str(error)
            return None, entry.reason

    def distrust(self, key: Any, reason: str) -> None:
        """From now on, the block is run again instead."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.graph, entry.reason = None, reason


_ENTRIES_KEPT = 8

#: What was recorded of blocks, by their first module; a plan that is applied anew finds it again.
_recorded: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Any, _Entry]]] = weakref.WeakKeyDictionary()


class Saving:
    """One run of a block that saves by an option."""

    reason = ""  # why nothing can be rebuilt

    def __init__(self, block: OpenedBlock, option: int, devices: Sequence[torch.device]) -> None:
        self.block, self.option = block, option
        self._decisions = block.inside.options[option]
        self._devices = tuple(devices)
        self._count = 0

    def running(self, arguments: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The surroundings of the run."""
        return contextlib.nullcontext()

    def pack(self, recorder: FirstRun | LaterRun) -> Callable[[torch.Tensor], Any]:
        """The pack hook to be used."""
        return recorder.pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Takes note of a tensor that autograd saves; says whether it is kept."""
        raise NotImplementedError

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        """After the run: what will rebuild the tensors that were not kept."""
        raise NotImplementedError


class _Following(Saving):
    """A run of which is known what it does."""

    def __init__(
        self,
        block: OpenedBlock,
        option: int,
        devices: Sequence[torch.device],
        program: Program | None,
        reason: str,
    ) -> None:
        super().__init__(block, option, devices)
        self.reason = reason
        self._rebuild = Rebuild(program) if program is not None else None

    def pack(self, recorder: FirstRun | LaterRun) -> Callable[[torch.Tensor], Any]:
        if self._rebuild is None or isinstance(recorder, LaterRun) or recorder.digest is not None:
            return recorder.pack
        return self._quick_pack(recorder, self._rebuild.program.quick)

    def _quick_pack(self, first: FirstRun, quick: Sequence[Quick | None]) -> Callable[[torch.Tensor], Any]:
        """`first.pack`, in short for a tensor that is as it was and kept or dropped without ado: called for every one,
        this is most of what a block costs of which a part is kept. Autograd's graph keeps it, so it holds no tensor.
        """
        lease, box, holders, metas = first.lease, first.box, first.holders, first.metas
        count, version = len(quick), _compat.saved_version
        assert box is not None

        def pack(tensor: torch.Tensor) -> Holder:
            index = len(holders)
            expected = quick[index] if index < count else None
            if expected is None or self._rebuild is None:
                return first.pack(tensor)
            meta, maker, is_kept, sample, argument = expected
            if tensor.shape != meta[0] or tensor.dtype is not meta[1] or maker not in (None, type(tensor.grad_fn)):
                return first.pack(tensor)
            holder: Holder
            if argument >= 0:
                if tensor is not first.leaves[argument]:
                    return first.pack(tensor)
                holder = ArgumentHolder(lease, argument, None)
            elif is_kept:
                holder = RebuiltHolder(lease, tensor.detach(), version(tensor), box, index)
            else:
                holder = RebuiltHolder(lease, None, 0, box, index)
                if sample is not None:
                    self._rebuild.note(index, sample.of(tensor))
            self._count = index + 1
            holders.append(weakref.ref(holder))
            metas.append(meta)
            return holder

        return pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        index = self._count
        self._count = index + 1
        rebuild = self._rebuild
        if rebuild is None:
            return index >= len(self._decisions) or self._decisions[index] == KEEP
        program = rebuild.program
        if index >= len(program.graph.packs) or not program.graph.packs[index].matches(tensor):
            self._rebuild, self.reason = None, "did something else than before"
            return True
        keep = rebuild.saved(index, tensor)
        if index + 1 in program.states:
            rebuild.take_state(index + 1, RandomState(self._devices))
        return keep

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        rebuild, self._rebuild = self._rebuild, None  # what it keeps can be dropped from now on
        if rebuild is None:
            return None
        if self._count != len(self._decisions):
            self.reason = "saved another number of tensors than before"
            return None
        if state is not None and 0 in rebuild.program.states:
            rebuild.take_state(0, state)
        return rebuild


class _Recording(Saving):
    """The first run of its kind: it is recorded, and its program is on trial."""

    def __init__(self, block: OpenedBlock, option: int, key: Any, devices: Sequence[torch.device]) -> None:
        super().__init__(block, option, devices)
        self._key = key
        self._constants = Constants(block.state.modules())
        self._recorder: Recorder | None = None
        self._kept: dict[int, torch.Tensor] = {}  # and masks
        self._states: dict[int, RandomState] = {}
        self._prints: dict[int, Any] = {}

    @contextlib.contextmanager
    def running(self, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        state = self.block.state
        self._recorder = Recorder(arguments, state.parameters(), [r[k] for r, k in state.buffers()])
        with self._recorder:
            yield

    def pack(self, recorder: FirstRun | LaterRun) -> Callable[[torch.Tensor], Any]:
        def pack(tensor: torch.Tensor) -> Any:
            assert self._recorder is not None
            with self._recorder.paused():
                return recorder.pack(tensor)

        return pack

    def keeps(self, tensor: torch.Tensor) -> bool:
        assert self._recorder is not None
        index = self._count
        self._count = index + 1
        self._recorder.pack(tensor)
        letter = self._decisions[index] if index < len(self._decisions) else KEEP
        if letter != KEEP:
            self._prints[index] = fingerprint(tensor)
        if letter == MASK:
            self._kept[index] = mask_of(tensor)
        elif letter == KEEP:
            self._kept[index] = tensor.detach()
        if self._count in self.block.inside.draws:
            self._states[self._count] = RandomState(self._devices)
        return letter == KEEP

    def finish(self, output: Any, state: RandomState | None) -> Rebuild | None:
        assert self._recorder is not None
        with torch.no_grad():
            self.block.learn(self._key, self._recorder.graph(output), self._constants)
        kept, states, self._recorder = self._kept, self._states, None
        self._kept, self._states = {}, {}  # autograd's graph keeps the hooks, and so this
        program, self.reason = self.block.program(self._key, self.option)
        if program is None:
            return None
        rebuild = Rebuild(program)
        rebuild.prints = self._prints
        for index in program.held:
            rebuild.hold(index, kept[index])
        for count in program.states:
            known = states.get(count) if count else state
            if known is not None:
                rebuild.take_state(count, known)
        return rebuild


# -- what a recorded run depends on --------------------------------------------------------------------------

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Constants:
    """The attributes of modules, and of plain objects among them, that a forward may read: numbers, names, parts.

    Refers to modules and functions weakly, so that a model is freed as ever.
    """

    __slots__ = ("_owners", "_references", "_values")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners: dict[int, Any] = {id(module): module for module in modules}
        for module in modules:
            owners.update({id(value): value for value in vars(module).values() if _is_plain_object(value)})
        self._values: list[tuple[weakref.ref[Any], Callable[[Any], Any], Any]] = []  # of owner: numbers, names
        self._references = list(filter(None, map(_References, owners.values())))
        for owner in owners.values():
            attributes = vars(owner)
            values_of = _getter([name for name, value in attributes.items() if _is_constant(value)])
            self._values.append((weakref.ref(owner), values_of, values_of(attributes)))

    def hold(self) -> bool:
        """Whether all are as they were."""
        try:
            for where, values_of, values in self._values:
                owner = where()
                if owner is None or values_of(owner.__dict__) != values:
                    return False
        except KeyError:
            return False
        return all(map(_References.hold, self._references))


class _References:
    """The functions, plain objects and parts that a module or a plain object refers to.

    They are compared by identity. That of one which is gone may be given to another, so it is noted when one goes.
    """

    __slots__ = ("_gone", "_ids", "_objects_of", "_parts", "_parts_of", "_references", "_where")

    def __init__(self, owner: Any) -> None:
        self._where, attributes = weakref.ref(owner), vars(owner)
        names = [name for name, value in attributes.items() if _is_referred_to(value)]
        self._parts = list(owner._modules) if isinstance(owner, nn.Module) else []
        self._objects_of, self._parts_of = _getter(names), _getter(self._parts)
        referred = (*self._objects_of(attributes), *(self._parts_of(owner._modules) if self._parts else ()))
        self._gone: list[weakref.ref[Any]] = []
        self._references = [weakref.ref(value, self._gone.append) for value in referred if value is not None]
        self._ids = _ids(referred)

    def __bool__(self) -> bool:
        return bool(self._references)

    def hold(self) -> bool:
        """Whether all are the ones of then."""
        owner = self._where()
        if owner is None or self._gone:
            return False
        try:
            found = self._objects_of(owner.__dict__)
            if self._parts:
                parts = owner._modules
                if len(parts) != len(self._parts):
                    return False
                found = (*found, *self._parts_of(parts))
        except KeyError:
            return False
        return _ids(found) == self._ids


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the items of these names, as a tuple."""
    return operator.itemgetter(*names, names[0]) if names else _nothing  # of one name, it would be no tuple


def _nothing(_: Any) -> tuple[()]:
    return ()


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _is_constant(value: Any) -> bool:
    return isinstance(value, _ATOMS) or (isinstance(value, tuple) and all(isinstance(item, _ATOMS) for item in value))


def _is_referred_to(value: Any) -> bool:
    return isinstance(value, types.FunctionType) or _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    """Something with attributes of its own that is neither a module nor the plug-in's."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    if type(value).__module__.startswith(__package__ + "."):
        return False
    return hasattr(value, "__dict__") and hasattr(type(value), "__weakref__")


def _frozen(shape: Any) -> Any:
    """A tree without its tensors, to compare and to hash."""
    cls = type(shape)
    if cls is Slot:
        return "tensor", shape.index
    if isinstance(shape, dict):
        return cls, tuple([(key, _frozen(item)) for key, item in shape.items()])
    if isinstance(shape, (tuple, list)):
        return cls, tuple([_frozen(item) for item in shape])
    if isinstance(shape, float) and shape != shape:
        return "not a number"
    return shape if isinstance(shape, _ATOMS) else cls


def _leaves_key(leaves: Sequence[torch.Tensor]) -> Any:
    """Shapes, types, and which leaves lie in one storage."""
    storages: dict[int, int] = {}
    found = []
    for index, leaf in enumerate(leaves):
        where = storages.setdefault(_compat.storage_key(leaf), index)
        layout = (leaf.stride(), leaf.storage_offset()) if leaf.layout is torch.strided else ()
        found.append((leaf.shape, layout, leaf.dtype, leaf.device, leaf.requires_grad, leaf.grad_fn is None, where))
    return tuple(found)
