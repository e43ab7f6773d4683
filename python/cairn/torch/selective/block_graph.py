"""What a block does: its operations in order, the values between them, and which of these autograd saves.

Problem. To keep a part of what a block saves and rebuild the rest, one has to know how each saved tensor came about.
Hooks on saved tensors tell what is saved and when, not from what it was computed.

Recording. The block runs once, in its own autograd graph, while a dispatch mode writes down every operation that
reaches a kernel, below autograd and autocast, and pack hooks note what is saved in between. A *value* is one version
of one storage: an operation makes the first version of the storages that it returns, and the next version of those that
it writes in place. Views make no values; an operand is a value and how the operation looks at it (size, stride,
offset). So aliases are one value, nothing is kept twice, and an in-place chain is a chain of values.

What may be replayed is decided by rule, and the rule has a name (`Operation.reason`): operations of unknown libraries,
those that write what was there before the block, and random ones whose state was not at hand are not replayed; what
they made is kept. A block that reads the values of its tensors from Python, whose shapes depend on data, that writes
its arguments or changes its own attributes cannot be relied on to do the same in the next step: it is not opened at
all (`BlockGraph.closed`). Batch normalisation writes statistics that its schema does not declare; it is replayed
without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, clock, memory, operators
from ..base._compat import PLAIN_CLASSES
from ..base.tree import Slot, Tree, tensors_in
from . import submodule_hooks
from .saved_tensors import View, geometry
from .submodule_calls import Call

ARGUMENT, PARAMETER, BUFFER, OUTSIDE = "argument", "parameter", "buffer", "outside"
Root = tuple[str, int]  # where a value comes from that was there before the block: kind, and which

MAX_OPERATIONS = 20000

_READERS = "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "set_", "apply_"
_READS_VALUES = frozenset(getattr(torch.Tensor, name) for name in _READERS if hasattr(torch.Tensor, name))
#: Functions that read no values of the last tensor that they are passed, but how it looks.
_LIKE_ANOTHER = {"expand_as", "view_as", "reshape_as", "type_as", "to", "sum_to_size", "broadcast_tensors"}
_BATCH_NORMS = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"}
_TAKES_NO_STATISTICS = {"native_batch_norm", "cudnn_batch_norm"}
_RESERVED = 3  # among the results
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
_RESHAPES = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}  # while recorded, one for another


@dataclasses.dataclass(frozen=True)
class Use:
    """An operand, or a saved tensor: a value and how it is looked at."""

    value: int
    view: View


@dataclasses.dataclass
class Value:
    """One version of one storage. `base` is how the tensor looked that the operation returned."""

    index: int
    storage: int  # a number for the storage, the same for all its versions
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    base: View
    operation: int = -1  # which one made it; -1: it was there before
    root: Root | None = None
    before: int = -1  # the version that was written over
    overwritten: bool = False  # there is a later version


@dataclasses.dataclass
class Operation:
    """One call of a kernel, with its tensors taken out."""

    function: Any
    tree: Tree  # of (args, kwargs)
    operands: list[Use]
    made: dict[int, int]  # value by position among the tensors of the result
    written: dict[int, int]  # value made by writing in place, by operand
    results: int  # tensors in the result
    packs_before: int  # how many tensors were saved when it ran
    random: bool = False
    reason: str = ""  # why it is not replayed; empty: it may be
    nanoseconds: int = 0

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def values(self) -> Iterator[int]:
        yield from self.made.values()
        yield from self.written.values()


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """A tensor that autograd saves. `maker`: the kind of graph node that it came from; None: it was there before.

    cyclic: it may come from the very node that saves it, so that the graph must not hold it with its history.
    read_inside: the block reads it before it has ended, in a backward of its own.
    """

    use: Use | None  # None: not a plain tensor, or its value as another type, conjugate or negative
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    maker: Any
    cyclic: bool = True
    read_inside: bool = False

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be this one in another run."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype or type(tensor) not in PLAIN_CLASSES:
            return False
        if self.maker is not None and type(tensor.grad_fn) is not self.maker:
            return False
        return self.use is None or (tensor.stride(), tensor.storage_offset()) == self.use.view[1:]


@dataclasses.dataclass
class BlockGraph:
    """A recorded run of a block. `returned`: the storages of what it returns; `calls`: of its parts."""

    values: list[Value]
    operations: list[Operation]
    packs: list[Pack]
    returned: frozenset[int]
    closed: str = ""  # why the block cannot be opened; empty: it can
    calls: Sequence[Call] = ()

    def is_dense(self, value: int) -> bool:
        """Whether the tensor that an operation returned fills its storage, so that a copy of it has the same layout."""
        return _is_dense(self.values[value])

    def digest(self) -> str:
        """Equal for runs that do the same on tensors of whatever size, whatever else they are passed and do not use."""
        met: list[int] = []  # the values that are used
        places: dict[int, int] = {}

        def number(value: int) -> int:
            if value < 0 or value in places:
                return places.get(value, value)
            places[value] = len(met)
            met.append(value)
            return places[value]

        lines = [str(number(pack.use.value) if pack.use else None) for pack in self.packs]
        for op in self.operations:
            operands = [number(use.value) for use in op.operands]
            made, written = ({k: number(v) for k, v in of.items()} for of in (op.made, op.written))
            lines.append(f"{op.name} {operands} {made} {written} {op.packs_before} {bool(op.reason)}")
        arguments: dict[Root, int] = {}
        for value in map(self.values.__getitem__, met):  # to which the next line adds
            root = value.root
            if root is not None and root[0] == ARGUMENT:
                root = ARGUMENT, arguments.setdefault(root, len(arguments))
            lines.append(f"{root} {value.operation} {number(value.before)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class BlockRecorder:
    """Records one run of a block: `with recorder: output = forward(...)`, its pack hooks calling `pack`.

    parts: the block's modules, whose calls are noted.
    timed: the device that operations are waited for on, where their times count.
    """

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor | None],
        buffers: Sequence[torch.Tensor | None],
        parts: Sequence[nn.Module] = (),
        timed: torch.device | None = None,
    ) -> None:
        self._notes, self._parts = _Notes(timed), parts
        for kind, tensors in ((ARGUMENT, arguments), (PARAMETER, parameters), (BUFFER, buffers)):
            for index, tensor in enumerate(tensors):
                if tensor is not None and memory.has_storage(tensor):
                    self._notes.root(tensor, (kind, index))
        if any(type(t) not in PLAIN_CLASSES for t in arguments):
            self._notes.close("gets a tensor of a class of its own")

    def __enter__(self) -> BlockRecorder:
        with contextlib.ExitStack() as entered:
            entered.enter_context(submodule_hooks.noted(self._parts, self._notes.saved_count, self._notes.calls))
            entered.enter_context(_Operations(self._notes))
            entered.enter_context(_Reads(self._notes))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.__exit__(*exc)

    def pack(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that autograd saves; only while paused."""
        self._notes.pack(tensor)

    def read(self, index: int) -> None:
        """Notes that the block itself reads a tensor that was saved."""
        self._notes.read.add(index)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the body does is not the block's doing."""
        self._notes.paused, before = True, self._notes.paused
        try:
            yield
        finally:
            self._notes.paused = before

    def close(self, reason: str) -> None:
        """The block is not to be opened."""
        self._notes.close(reason)

    def graph(self, output: Any) -> BlockGraph:
        """What was recorded; `output` is what the block returned."""
        return self._notes.graph(output)


class _Operations(_compat.DispatchMode):
    """Hands every operation to the notes."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._notes.operation(func, args, kwargs or {})


class _Reads(_compat.FunctionMode):
    """Sees when values of tensors are read past the dispatcher."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, notes = getattr(func, "__name__", str(func)), self._notes
        if notes.paused:
            return func(*args, **kwargs)
        if func in _READS_VALUES:
            notes.close(f"reads tensors from Python ({name})")
        notes.reached.clear()  # functions that this one calls do not come here
        result = func(*args, **kwargs)
        if name not in _LIKE_ANOTHER and self._is_by_values(args, kwargs, result):
            notes.close(f"depends on the values of its tensors ({name})")
        return result

    def _is_by_values(self, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether whole numbers were passed that no operation was, to make a tensor: `tensor_split` reads them itself.

        What is returned as it was, or as a view, reads nothing.
        """
        passed = (t for t in tensors_in((args, kwargs)) if _is_plain(t) and not t.dtype.is_floating_point)
        keys = {_compat.storage_id(t) for t in passed if not t.dtype.is_complex} - self._notes.reached
        made = {_compat.storage_id(t) for t in tensors_in(result) if _is_plain(t)} if keys else set()
        return bool(made) and not keys <= made


class _Notes:
    """The record while it grows."""

    def __init__(self, timed: torch.device | None) -> None:
        self._timed = timed
        self._values: list[Value] = []
        self._operations: list[Operation] = []
        self._packs: list[Pack] = []
        self.calls: list[Call] = []
        self._current: dict[int, Value] = {}  # by storage: its latest version
        self._references: list[_compat.StorageRef] = []  # so that no storage is given the number of another
        self._closed = ""
        self.paused = False
        self.read: set[int] = set()  # the saved tensors that the block reads itself
        self.reached: set[int] = set()  # the storages that operations were passed, in the present call of a function

    def close(self, reason: str) -> None:
        self._closed = self._closed or reason

    def saved_count(self) -> int:
        return len(self._packs)

    def root(self, tensor: torch.Tensor, root: Root) -> Value:
        """The value that was there before the block in a tensor's storage."""
        key = _compat.storage_id(tensor)
        if key not in self._current:
            self._value(tensor, root=root)
        return self._current[key]

    def pack(self, tensor: torch.Tensor) -> None:
        use: Use | None = None
        maker: Any = type(tensor.grad_fn)
        value = self.root(tensor, (OUTSIDE, 0)) if _is_plain(tensor) else None
        if value is not None and tensor.dtype == value.dtype and not (tensor.is_conj() or tensor.is_neg()):
            use = Use(value.index, geometry(tensor))
            if value.root is not None or getattr(maker, "__name__", "") in _RESHAPES:
                maker = None
        cyclic = not _compat.is_made_earlier(tensor)
        self._packs.append(Pack(use, tensor.shape, tensor.dtype, tensor.device, maker, cyclic))

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.paused:
            return func(*args, **kwargs)
        if operators.is_higher_order(func):
            self.close(f"calls the higher-order operator {func}, which is recomputed as a whole")
            return func(*args, **kwargs)
        tree = Tree.of((args, kwargs))
        known = [_is_plain(t) for t in tree.leaves]
        self.reached.update(_compat.storage_id(t) for t, plain in zip(tree.leaves, known, strict=True) if plain)
        operands = [
            Use(self.root(t, (OUTSIDE, 0)).index, geometry(t)) if plain else Use(-1, ((), (), 0))
            for t, plain in zip(tree.leaves, known, strict=True)
        ]
        dtypes = [t.dtype for t in tree.leaves]
        began = self._now()
        result = func(*args, **kwargs)
        took = self._now() - began
        written = [i for i in _written(func, tree, args, kwargs) if known[i]]
        op = Operation(func, tree, operands, {}, {}, 0, len(self._packs), nanoseconds=took)
        op.random = torch.Tag.nondeterministic_seeded in func.tags
        op.reason = "" if all(known) else "works on tensors of a class of its own"
        self._note_results(op, result)
        if op.made or written or op.random:
            self._note_writes(op, tree.leaves, written)
            op.reason = op.reason or self._reason(op, dtypes)
            for value in op.values:
                self._values[value].operation = len(self._operations)
            tree.leaves = []
            self._operations.append(op)
        self._close_by(func, dtypes)
        return result

    def _now(self) -> int:
        if self._timed is not None:
            clock.wait_for(self._timed)
        return clock.read()

    def _value(self, tensor: torch.Tensor, root: Root | None = None, before: int = -1) -> Value:
        reference = _compat.StorageRef(tensor)
        self._references.append(reference)
        value = Value(len(self._values), reference.key, reference.nbytes, tensor.dtype, tensor.device, geometry(tensor))
        value.root, value.before = root, before
        self._values.append(value)
        self._current[reference.key] = value
        return value

    def _note_results(self, op: Operation, result: Any) -> None:
        for position, tensor in enumerate(tensors_in(result)):
            op.results += 1
            if not _is_plain(tensor):
                op.reason = op.reason or "makes a tensor of a class of its own"
            elif _compat.storage_id(tensor) not in self._current:
                op.made[position] = self._value(tensor).index

    def _note_writes(self, op: Operation, leaves: Sequence[torch.Tensor], written: Sequence[int]) -> None:
        done: set[int] = set()
        for index in written:
            old = self._current[_compat.storage_id(leaves[index])]
            if old.storage in done:
                op.reason = op.reason or "writes one tensor in several ways"
                continue
            done.add(old.storage)
            new = self._value(leaves[index], before=old.index)
            new.base, new.dtype = old.base, old.dtype
            if not _is_dense(old):
                op.reason = op.reason or "writes a part of a storage"
            old.overwritten = True
            op.written[index] = new.index
            if self._is_of_root(old):
                op.reason = op.reason or "writes what was there before the block"
                root = self._first(old).root
                if root is not None and root[0] != BUFFER:
                    self.close(f"writes what it did not make ({op.name})")

    def _first(self, value: Value) -> Value:
        while value.before >= 0:
            value = self._values[value.before]
        return value

    def _is_of_root(self, value: Value) -> bool:
        return self._first(value).root is not None

    def _reason(self, op: Operation, dtypes: Sequence[torch.dtype]) -> str:
        """Why an operation is not replayed."""
        func = op.function
        if func.namespace != "aten":
            return f"is an operation of {func.namespace}"
        if any(dtype != self._values[use.value].dtype for use, dtype in zip(op.operands, dtypes, strict=True)):
            return "looks at a tensor as another type"
        if any(t.is_conj() or t.is_neg() for t in op.tree.leaves):
            return "looks at a tensor as conjugate or negative"
        if _has_generator(op.tree.shape):
            return "draws from a generator of its own"
        name = _short(func)
        if not operators.repeats(name, op.tree.leaves):
            return "works in no fixed order"
        if name == "lift_fresh":
            return "brings in a value from Python"
        return ""

    def _close_by(self, func: Any, dtypes: Sequence[torch.dtype]) -> None:
        if len(self._operations) > MAX_OPERATIONS:
            self.close(f"has more than {MAX_OPERATIONS} operations")
        by_positions = _short(func) == "index" and torch.bool not in dtypes and torch.uint8 not in dtypes
        dynamic = torch.Tag.dynamic_output_shape in func.tags and not by_positions
        if torch.Tag.data_dependent_output in func.tags or dynamic:
            self.close(f"depends on the values of its tensors ({func})")
        if torch.Tag.inplace_view in func.tags or _short(func) in ("set_", "resize_", "equal"):
            self.close(f"uses {func}")
        if "c10d" in func.namespace:
            self.close(f"communicates ({func})")

    def graph(self, output: Any) -> BlockGraph:
        returned = frozenset(_compat.storage_id(t) for t in tensors_in(output) if memory.has_storage(t))
        self._refuse_stale_reads()
        self._refuse_hidden_draws()
        packs = list(map(self._as_backwards_find_it, self._packs))
        for index in self.read:
            packs[index] = dataclasses.replace(packs[index], read_inside=True)
        for op in self._operations:
            _simplify(op, self._values)
        return BlockGraph(self._values, self._operations, packs, returned, self._closed, self.calls)

    def _as_backwards_find_it(self, pack: Pack) -> Pack:
        """A saved tensor whose storage was written later, beside it (the gates of a GRU cell): as its last version."""
        value = self._values[pack.use.value] if pack.use is not None and pack.use.value >= 0 else None
        if pack.use is None or value is None or not value.overwritten or self._is_of_root(value):
            return pack
        last = later = self._current[value.storage]
        while later is not value:
            op = self._operations[later.operation]
            written = next(op.operands[index].view for index, new in op.written.items() if new == later.index)
            if _may_meet(written, pack.use.view):
                return pack
            later = self._values[later.before]
        # its history may have what was written since
        return dataclasses.replace(pack, use=Use(last.index, pack.use.view), cyclic=True)

    def _refuse_stale_reads(self) -> None:
        """What reads a buffer that the block writes later finds another value in the backward."""
        for op in self._operations:
            for use in op.operands:
                value = self._values[use.value] if use.value >= 0 else None
                if value is not None and value.root is not None and value.overwritten:
                    op.reason = op.reason or "reads what the block writes later"

    def _refuse_hidden_draws(self) -> None:
        """Random state is at hand when a tensor is saved: one draw after that can be repeated, a second one not."""
        drawn_at: set[int] = set()
        for op in self._operations:
            if op.random:
                if op.packs_before in drawn_at:
                    op.reason = op.reason or "draws where the random state is not at hand"
                drawn_at.add(op.packs_before)


def _may_meet(one: View, other: View) -> bool:
    """Whether two views of a storage may have an element in common; surely not where False is said."""
    (sizes, strides, offset), (other_sizes, other_strides, other_offset) = one, other
    if strides != other_strides:
        return True
    dims = sorted(zip(strides, sizes, other_sizes, strict=True), reverse=True)

    def reaches(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
        """Whether steps along these dimensions lead so far."""
        if not dims:
            return distance == 0
        (stride, size, other_size), *rest = dims
        if stride <= sum(step * (max(sizes) - 1) for step, *sizes in rest):
            return True  # not told apart by their strides
        steps = {distance // stride, -(-distance // stride)}
        return any(reaches(distance - n * stride, rest) for n in steps if -other_size < n < size)

    return reaches(other_offset - offset, dims)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN_CLASSES and memory.has_storage(tensor)


def _short(func: Any) -> str:
    return str(func._schema.name).rpartition(":")[2]


def _has_generator(shape: Any) -> bool:
    if isinstance(shape, torch.Generator):
        return True
    if isinstance(shape, dict):
        return any(_has_generator(item) for item in shape.values())
    return isinstance(shape, (tuple, list)) and any(_has_generator(item) for item in shape)


def _written(func: Any, tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Which tensors of the arguments an operation writes, by its schema."""
    if not func._schema.is_mutable:
        return []
    positions = {id(t): i for i, t in enumerate(tree.leaves)}
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [positions[id(t)] for t in tensors_in(value)]
    return list(dict.fromkeys(found))


# -- operations that read more than they need, or write more than they say ------------------------------------


def _simplify(op: Operation, values: Sequence[Value]) -> None:
    name = _short(op.function)
    if name in _LIKE and op.function.namespace == "aten" and not op.reason and len(op.made) == 1:
        _make_from_nothing(op, name, values[next(iter(op.made.values()))])
    elif name in _BATCH_NORMS and not op.reason:
        _without_statistics(op, name, values)


def _make_from_nothing(op: Operation, name: str, made: Value) -> None:
    """A tensor like another one: of that other only the shape is needed, which is known."""
    size, stride, _ = made.base
    if not _is_dense(made):
        return
    fill: Callable[[torch.Tensor], Any] | None = None
    if not name.endswith(("empty", "empty_like")):
        value = 0 if "zeros" in name else 1 if "ones" in name else _fill_value(op.tree.shape)
        if value is None:
            return

        def fill(tensor: torch.Tensor) -> Any:
            return tensor.fill_(value)

    op.function = _Factory(op.name, fill)
    op.operands = []
    op.tree = Tree(((size, stride), {"dtype": made.dtype, "device": made.device}), [], [])


def _fill_value(shape: Any) -> Any:
    args, kwargs = shape
    scalars = [item for item in args if isinstance(item, (int, float, bool))]
    found = kwargs.get("fill_value", scalars[-1] if scalars else None)
    return found if isinstance(found, (int, float, bool)) else None


class _Factory:
    """Makes a tensor of a given shape, filled or not."""

    def __init__(self, name: str, fill: Callable[[torch.Tensor], Any] | None) -> None:
        self._name, self._fill = name, fill

    def __str__(self) -> str:
        return self._name

    def __call__(self, size: Any, stride: Any, **options: Any) -> torch.Tensor:
        tensor = torch.empty_strided(size, stride, **options)
        if self._fill is not None:
            self._fill(tensor)
        return tensor


def _without_statistics(op: Operation, name: str, values: Sequence[Value]) -> None:
    """Batch statistics come from the input alone; the running ones, which it also writes, are left out.

    cuDNN may keep something for the backward beside them, of which it is not said that all of it is written.
    """
    args, kwargs = op.tree.shape
    if name == "_native_batch_norm_legit" or len(args) < 6 or kwargs:
        op.reason = "writes statistics"
        return
    training = args[5]
    if training is not True:
        return
    reserved = op.made.get(_RESERVED)
    if name not in _TAKES_NO_STATISTICS or (reserved is not None and values[reserved].nbytes > 0):
        op.reason = "writes statistics"
        return
    dropped = {item.index for item in args[3:5] if type(item) is Slot}
    _drop_operands(op, (*args[:3], None, None, *args[5:]), dropped)


def _drop_operands(op: Operation, args: tuple[Any, ...], dropped: set[int]) -> None:
    order = [i for i in range(len(op.operands)) if i not in dropped]
    places = {old: new for new, old in enumerate(order)}
    args = tuple(Slot(places[a.index]) if type(a) is Slot else a for a in args)
    op.operands = [op.operands[i] for i in order]
    op.tree = Tree((args, {}), [], [])


def _is_dense(value: Value) -> bool:
    size, stride, offset = value.base
    if offset or value.nbytes != _dense_bytes(size, value.dtype):
        return False
    expected = 1
    for step, extent in sorted((st, e) for st, e in zip(stride, size, strict=True) if e != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def _dense_bytes(size: Sequence[int], dtype: torch.dtype) -> int:
    count = 1
    for extent in size:
        count *= extent
    return count * dtype.itemsize
