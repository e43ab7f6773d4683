"""Records the operations of a run of a block, and the tensors that autograd saves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, clock, memory, operators
from ..base._compat import PLAIN_CLASSES
from ..base.tree import Tree, tensors_in
from . import submodule_hooks
from .block_graph import (
    ARGUMENT,
    BUFFER,
    MAX_OPERATIONS,
    OUTSIDE,
    PARAMETER,
    BlockGraph,
    Operation,
    Pack,
    Root,
    Use,
    Value,
    is_dense,
    short_name,
)
from .graph_simplify import simplify
from .saved_tensors import View, geometry
from .submodule_calls import Call

_READERS = "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "set_", "apply_"
_READS_VALUES = frozenset(getattr(torch.Tensor, name) for name in _READERS if hasattr(torch.Tensor, name))
#: Functions that read no values of the last tensor that they are passed, but how it looks.
_LIKE_ANOTHER = {"expand_as", "view_as", "reshape_as", "type_as", "to", "sum_to_size", "broadcast_tensors"}
_RESHAPES = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}  # while recorded, one for another


class BlockRecorder:
    """Records one run of a block: `with recorder: output = forward(...)`, its pack hooks calling `pack`.

    parts: the block's modules, whose calls are recorded.
    timed: the device to synchronize after each operation, if operations are timed.
    """

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor | None],
        buffers: Sequence[torch.Tensor | None],
        parts: Sequence[nn.Module] = (),
        timed: torch.device | None = None,
    ) -> None:
        self._parts, self._timed = parts, timed
        self._values: list[Value] = []
        self._operations: list[Operation] = []
        self._packs: list[Pack] = []
        self._calls: list[Call] = []
        self._current: dict[int, Value] = {}  # by storage: its latest version
        self._references: list[_compat.StorageRef] = []  # so that no storage is given the number of another
        self._refusal = ""
        self._read_in_forward: set[int] = set()  # the saved tensors that the block reads itself
        self.is_paused = False
        self.is_recording = False  # an operation: what its record reads of tensors is no read of the block
        self.reached: set[int] = set()  # the storages that operations were passed, in the present call of a function
        for kind, tensors in ((ARGUMENT, arguments), (PARAMETER, parameters), (BUFFER, buffers)):
            for index, tensor in enumerate(tensors):
                if tensor is not None and memory.has_storage(tensor):
                    self._root(tensor, (kind, index))
        if any(type(t) not in PLAIN_CLASSES for t in arguments):
            self.refuse("gets a tensor of a class of its own")

    def __enter__(self) -> BlockRecorder:
        with contextlib.ExitStack() as entered:
            calls = submodule_hooks.recorded_calls(self._parts, lambda: len(self._packs), self._calls)
            entered.enter_context(calls)
            entered.enter_context(_Operations(self))
            entered.enter_context(_Reads(self))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.__exit__(*exc)

    def read(self, index: int) -> None:
        """Record that the block itself reads a saved tensor."""
        self._read_in_forward.add(index)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the operations of the body."""
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before

    def refuse(self, reason: str) -> None:
        """Mark the block as not to be recomputed selectively."""
        self._refusal = self._refusal or reason

    def _root(self, tensor: torch.Tensor, root: Root) -> Value:
        """The value of a tensor's storage from before the block."""
        key = _compat.storage_id(tensor)
        if key not in self._current:
            self._value(tensor, root=root)
        return self._current[key]

    def pack(self, tensor: torch.Tensor) -> None:
        """Record a tensor that autograd saves; only while paused."""
        use: Use | None = None
        maker: Any = type(tensor.grad_fn)
        value = self._root(tensor, (OUTSIDE, 0)) if _is_plain(tensor) else None
        if value is not None and tensor.dtype == value.dtype and not (tensor.is_conj() or tensor.is_neg()):
            use = Use(value.index, geometry(tensor))
            if value.root is not None or getattr(maker, "__name__", "") in _RESHAPES:
                maker = None
        cyclic = not _compat.is_made_earlier(tensor)
        self._packs.append(Pack(use, tensor.shape, tensor.dtype, tensor.device, maker, cyclic))

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and record it."""
        if self.is_paused:
            return func(*args, **kwargs)
        if operators.is_higher_order(func):
            self.refuse(f"calls the higher-order operator {func}, which is recomputed as a whole")
            return func(*args, **kwargs)
        tree = Tree.of((args, kwargs))
        known = [_is_plain(t) for t in tree.leaves]
        self.reached.update(_compat.storage_id(t) for t, plain in zip(tree.leaves, known, strict=True) if plain)
        operands = [
            Use(self._root(t, (OUTSIDE, 0)).index, geometry(t)) if plain else Use(-1, ((), (), 0))
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
        self._record_results(op, result)
        if op.new_values or written or op.random:
            self._record_writes(op, tree.leaves, written)
            op.reason = op.reason or self._reason(op, dtypes)
            for value in op.values:
                self._values[value].operation = len(self._operations)
            tree.leaves = []
            self._operations.append(op)
        self._refuse_by(func, dtypes)
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

    def _record_results(self, op: Operation, result: Any) -> None:
        for position, tensor in enumerate(tensors_in(result)):
            op.results += 1
            if not _is_plain(tensor):
                op.forbid("makes a tensor of a class of its own")
            elif _compat.storage_id(tensor) in self._current:
                continue
            elif short_name(op.function) == "lift_fresh":  # a real tensor stays itself, a fake one gets a new storage
                self._references.append(_compat.StorageRef(tensor))
                self._current[self._references[-1].key] = self._values[op.operands[0].value]
            else:
                op.new_values[position] = self._value(tensor).index

    def _record_writes(self, op: Operation, leaves: Sequence[torch.Tensor], written: Sequence[int]) -> None:
        done: set[int] = set()
        for index in written:
            old = self._current[_compat.storage_id(leaves[index])]
            if old.storage in done:
                op.forbid("writes one tensor in several ways")
                continue
            done.add(old.storage)
            new = self._value(leaves[index], before=old.index)
            new.base, new.dtype = old.base, old.dtype
            if not is_dense(old):
                op.forbid("writes a part of a storage")
            old.overwritten = True
            op.written[index] = new.index
            if self._is_of_root(old):
                op.forbid("writes what was there before the block")
                root = self._first(old).root
                if root is not None and root[0] != BUFFER:
                    self.refuse(f"writes what it did not make ({op.name})")

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
        if not operators.repeats(short_name(func), op.tree.leaves):
            return "works in no fixed order"
        return ""

    def _refuse_by(self, func: Any, dtypes: Sequence[torch.dtype]) -> None:
        if len(self._operations) > MAX_OPERATIONS:
            self.refuse(f"has more than {MAX_OPERATIONS} operations")
        by_positions = short_name(func) == "index" and torch.bool not in dtypes and torch.uint8 not in dtypes
        dynamic = torch.Tag.dynamic_output_shape in func.tags and not by_positions
        if torch.Tag.data_dependent_output in func.tags or dynamic:
            self.refuse(f"depends on the values of its tensors ({func})")
        if torch.Tag.inplace_view in func.tags or short_name(func) in ("set_", "resize_", "equal"):
            self.refuse(f"uses {func}")
        if "c10d" in func.namespace:
            self.refuse(f"communicates ({func})")

    def graph(self, output: Any) -> BlockGraph:
        """The recorded graph; `output` is the block's result."""
        returned = frozenset(_compat.storage_id(t) for t in tensors_in(output) if memory.has_storage(t))
        self._refuse_stale_reads()
        self._refuse_hidden_draws()
        packs = list(map(self._latest_version, self._packs))
        for index in self._read_in_forward:
            packs[index] = dataclasses.replace(packs[index], read_in_forward=True)
        for op in self._operations:
            simplify(op, self._values)
        return BlockGraph(self._values, self._operations, packs, returned, self._refusal, self._calls)

    def _latest_version(self, pack: Pack) -> Pack:
        """A saved tensor in its last version, if other parts of its storage were written later (a GRU cell's gates)."""
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
        # its autograd graph may contain the later writes
        return dataclasses.replace(pack, use=Use(last.index, pack.use.view), cyclic=True)

    def _refuse_stale_reads(self) -> None:
        """Forbid the replay of operations that read a buffer which the block writes later: its value is lost."""
        for op in self._operations:
            for use in op.operands:
                value = self._values[use.value] if use.value >= 0 else None
                if value is not None and value.root is not None and value.overwritten:
                    op.forbid("reads what the block writes later")

    def _refuse_hidden_draws(self) -> None:
        """Forbid the replay of random operations whose state is unknown.

        The random state is recorded when a tensor is saved. The first draw after that can be repeated, a second cannot.
        """
        drawn_at: set[int] = set()
        for op in self._operations:
            if op.random:
                if op.packs_before in drawn_at:
                    op.forbid("draws where the random state is not at hand")
                drawn_at.add(op.packs_before)


class _Operations(_compat.DispatchMode):
    """Passes every operation to the record."""

    def __init__(self, recorder: BlockRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        is_outermost, recorder.is_recording = not recorder.is_recording, True
        try:
            return recorder.operation(func, args, kwargs or {})
        finally:
            recorder.is_recording = not is_outermost


class _Reads(_compat.FunctionMode):
    """Detects reads of tensors' values that bypass the dispatcher."""

    def __init__(self, recorder: BlockRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, recorder = getattr(func, "__name__", str(func)), self._recorder
        if recorder.is_paused or recorder.is_recording:
            return func(*args, **kwargs)
        if func in _READS_VALUES:
            recorder.refuse(f"reads tensors from Python ({name})")
        recorder.reached.clear()  # functions that this one calls do not come here
        result = func(*args, **kwargs)
        if name not in _LIKE_ANOTHER and self._is_by_values(args, kwargs, result):
            recorder.refuse(f"depends on the values of its tensors ({name})")
        return result

    def _is_by_values(self, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether a function read the integers of an argument that it passed to no operation, as `tensor_split` does.

        A function that returns its argument or a view of it reads nothing.
        """
        passed = (t for t in tensors_in((args, kwargs)) if _is_plain(t) and not t.dtype.is_floating_point)
        keys = {_compat.storage_id(t) for t in passed if not t.dtype.is_complex} - self._recorder.reached
        new_storages = {_compat.storage_id(t) for t in tensors_in(result) if _is_plain(t)} if keys else set()
        return bool(new_storages) and not keys <= new_storages


def _may_meet(one: View, other: View) -> bool:
    """Whether two views of a storage may share an element; False only if they certainly do not."""
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


def _has_generator(shape: Any) -> bool:
    if isinstance(shape, torch.Generator):
        return True
    if isinstance(shape, dict):
        return any(_has_generator(item) for item in shape.values())
    return isinstance(shape, (tuple, list)) and any(_has_generator(item) for item in shape)


def _written(func: Any, tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Which tensors of the arguments an operation writes, by its schema."""
    schema = _compat.schema_of(func)
    if not schema.is_mutable:
        return []
    positions = {id(t): i for i, t in enumerate(tree.leaves)}
    found = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [positions[id(t)] for t in tensors_in(value)]
    return list(dict.fromkeys(found))
