"""Records a training step, operator by operator, while it runs: below autograd, the backward included.

The recorded step runs on real tensors. So the program has the operators that plain training calls, in its order, on its
shapes and strides. Nothing is captured symbolically.

A recorded operation must not write into a tensor that another operation may read. Otherwise it could not be recomputed.
So a write is recorded as

* part of the operation that made the storage, if nothing has read the storage and the operation keeps its position (a
  new tensor that is filled; an activation in place on a normalisation's output);
* the operator's form that returns a new tensor, if it writes a whole tensor (`add` for `add_`);
* otherwise the same write into a copy of the storage.

Numbers that Python reads from tensors decide which operators run next. Constants are the same in every step. Other
numbers are refused, or recorded with a check that they are unchanged, as the caller of `trace` chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base import _compat, memory, operators
from ..base.errors import Unsupported
from ..base.operators import Facts, Operator
from .graph_program import Call, ExternalTensor, Local
from .records import Geometry, LocalStorage, Operand, Output, Record
from .step_watch import Draws, Generators, Places
from .tape import Storage, Tape


@dataclass(frozen=True)
class _ExecutedCall:
    """A call that the step performed.

    Attributes
    ----------
    function
        The function that a run calls: the operator, or the operator and a check of its result.
    facts
        The known effects of the operator.
    args, kwargs
        Its arguments.
    results
        Its results, as a list.
    written
        The tensors that it wrote into.
    once
        It must not be repeated.
    """

    function: Callable[..., Any]
    facts: Facts
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Sequence[Any]
    written: Sequence[torch.Tensor]
    once: bool

    @property
    def label(self) -> str:
        """The operator's name for people."""
        return self.facts.name.rpartition("::")[2]

    @property
    def read(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return list(operators.tensors_of([*self.args, *self.kwargs.values()]))

    def new_results(self, *excluded: int) -> list[tuple[int, torch.Tensor]]:
        """The tensors among the results, with their positions, but for those in some storages."""
        tensors = ((i, t) for i, t in enumerate(self.results) if isinstance(t, torch.Tensor))
        return [(i, t) for i, t in tensors if _compat.storage_id(t) not in excluded]


class Recorder:
    """Records what runs inside `recording`; see the top of this file."""

    def __init__(
        self, model: nn.Module, outside: Sequence[ExternalTensor], devices: Sequence[torch.device], checks_numbers: bool
    ) -> None:
        self._places = Places(model)
        self.tape = Tape(self._places, outside)
        self.generators = Generators()
        self._draws = Draws(devices)
        self._checks_numbers = checks_numbers
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # what a write into an external replaced

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the body."""
        with self._places, _ReadingMode(self), _RecordingMode(self):
            yield

    def restore(self) -> None:
        """Gives tensors from outside the contents that they had."""
        with torch.no_grad():
            for tensor, contents in reversed(self._before):
                tensor.copy_(contents)
        self.generators.restore()

    # one call

    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator as usual and records it."""
        if operators.is_higher_order(operator):
            raise self._refusal(operator, "is a higher-order operator, and runs other operators where none is recorded")
        facts = operators.facts_of(operator)
        tensors = list(operators.tensors_of([*args, *kwargs.values()]))
        self._check_plain(operator, tensors)
        checked = operators.reads_numbers(operator, args) and self._must_check(str(operator), tensors)
        written = facts.tensors_written(args, kwargs)
        self._record_before(written)
        identities = [_identity(tensor) for tensor in written]
        drawing, generator = self._draws.before(), kwargs.get("generator")
        if generator is not None:
            self.generators.note(generator)
        result = operator(*args, **kwargs)
        once = self._draws.changed(drawing) or facts.is_collective or generator is not None
        function = operators.Checked(operator, result) if checked else operator
        if facts.is_collective:
            function = operators.SynchronousCollective(operator)
        self._check_plain(operator, list(operators.tensors_of(result)))
        executed = _ExecutedCall(function, facts, args, kwargs, _listed(result), written, once)
        if facts.is_literal:
            self._literal(args[0], result)
        elif facts.changes_view and [_identity(t)[0] for t in written] == [storage for storage, _ in identities]:
            pass  # the tensor shows another part of its storage, which is found when it is read
        elif written:
            if [_identity(tensor) for tensor in written] != identities:
                raise self._refusal(operator, "gives a tensor another shape or storage")
            self._write(executed)
        elif parts := operators.parts_of(facts, args):
            for part, arguments in parts:
                results = [each if i in part else None for i, each in enumerate(executed.results)]
                self._compute(dataclasses.replace(executed, args=arguments, results=results))
        elif executed.new_results():
            self._compute(executed)
        elif checked:
            self._check_again(executed)
        return result

    def read_numbers(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a function that reads a tensor's numbers and is no operator."""
        if name == "numpy" and self.tape.storage(args[0]).depends:
            raise self._refusal(name, "hands a tensor's numbers over to something else than torch")
        checked = self._must_check(name, [args[0]])
        numbers = function(*args, **kwargs)
        if checked:
            facts = Facts(f"::{name}", (), False, False, False, False)
            self._check_again(_ExecutedCall(operators.Checked(function, numbers), facts, args, kwargs, [], [], True))
        return numbers

    def _must_check(self, what: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether numbers that are read are more than the program's text: the program may branch on them."""
        for tensor in tensors:
            if self.tape.storage(tensor).depends and self._checks_numbers:
                return True
            if self.tape.storage(tensor).depends:
                raise Unsupported(
                    f"{what}{self._places.here()} reads numbers out of a tensor of shape {list(tensor.shape)} that "
                    "depends on parameters, inputs or random numbers: what the step does next may depend on them, and "
                    'one graph cannot stand for that. With numbers="check" the graph stands for the steps in which '
                    "they are what they are now"
                )
        return False

    def _check_plain(self, operator: Operator, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if type(tensor) not in _compat.PLAIN_CLASSES:
                raise self._refusal(operator, f"works on a {type(tensor).__name__}, which is more than a plain tensor")
            if not memory.has_storage(tensor):
                raise self._refusal(operator, f"works on a tensor of layout {tensor.layout}, which has no one storage")

    def _refusal(self, what: Any, reason: str) -> Unsupported:
        return Unsupported(f"{what}{self._places.here()} cannot be traced: it {reason}")

    def _record_before(self, written: Sequence[torch.Tensor]) -> None:
        """Keeps the contents of tensors from outside before the first write into them."""
        for tensor in written:
            storage = self.tape.storage(tensor)
            if not storage.was_written:
                outside = [self.tape.externals[index].tensor for index in storage.externals]
                self._before += [(t.detach(), t.detach().clone()) for t in outside]

    # calls that write nothing

    def _literal(self, given: torch.Tensor, result: torch.Tensor) -> None:
        """Record a literal: the result is the tensor that torch was given."""
        for tensor in (given, result):
            if not self.tape.knows(tensor):
                self.tape.add_literal(tensor)

    def _compute(self, executed: _ExecutedCall) -> None:
        results = executed.new_results()
        read = {_compat.storage_id(tensor) for tensor in executed.read}
        views = [_compat.storage_id(tensor) in read for _, tensor in results]
        if all(views):
            self._view(executed, results)
            return
        if any(views):
            raise self._refusal(executed.function, "returns both new tensors and views of its arguments")
        record = Record(executed.label, self.tape.in_backward, once=executed.once)
        record.calls.append(self._call(executed))
        self.tape.place(record)
        self.tape.add_outputs(record, 0, results, self._depends(executed))

    def _view(self, executed: _ExecutedCall, results: list[tuple[int, torch.Tensor]]) -> None:
        storage = self.tape.storage(results[0][1])
        if all(Geometry.of(tensor) in storage.views for _, tensor in results):
            return  # an equal view is recorded already
        record = Record(executed.label, self.tape.in_backward, base=storage.root)
        record.calls.append(self._call(executed, reads=False))
        self.tape.place(record)
        for index, tensor in results:
            geometry = Geometry.of(tensor)
            storage.views.setdefault(geometry, record.add_output(Local(0, index), geometry))

    def _check_again(self, executed: _ExecutedCall) -> None:
        """Records a call that read numbers of a tensor: a run reads them, too, and compares."""
        record = Record(f"{executed.label} (checked)", self.tape.in_backward, once=True)
        record.calls.append(self._call(executed))
        self.tape.place(record)

    def _depends(self, executed: _ExecutedCall) -> bool:
        return executed.once or any(self.tape.storage(tensor).depends for tensor in executed.read)

    # calls that write

    def _write(self, executed: _ExecutedCall) -> None:
        storages = {_compat.storage_id(tensor): self.tape.storage(tensor) for tensor in executed.written}
        results = executed.new_results(*storages)
        depends = self._depends(executed)
        if len(storages) == 1 and not results:
            (storage,) = storages.values()
            self._write_one(executed, storage)
            storage.depends = depends if executed.facts.overwrites else storage.depends or depends
            return
        self._write_copies(executed, storages, results)
        for storage in storages.values():
            storage.depends = storage.depends or depends

    def _write_one(self, executed: _ExecutedCall, storage: Storage) -> None:
        maker = self._unread_maker(executed, storage)
        if maker is not None:
            self._write_into(maker, executed, storage)
            return
        tensor = executed.written[0]
        whole = len(executed.written) == 1 and Geometry.of(tensor).covers(storage.ref.nbytes)
        if whole and executed.facts.overwrites and not _is_read_elsewhere(tensor, executed):
            self._overwrite(executed, storage)
            return
        other = operators.out_of_place(executed.function) if whole and not executed.once else None
        if other is not None and _computes_alike(other, executed):
            self._replace(other, executed, storage)
            return
        self._write_copies(executed, {storage.ref.key: storage}, [])

    def _unread_maker(self, executed: _ExecutedCall, storage: Storage) -> Record | None:
        """The record that made a storage without readers, if a write can be added to it at its position."""
        if storage.was_read or not isinstance(storage.root, Output):
            return None
        record = storage.root.record
        if record.is_backward != self.tape.in_backward:
            return None
        if executed.once and any(later.once for later in self.tape.records[record.position + 1 :]):
            return None  # random numbers are drawn in the order of the step
        for tensor in executed.read:
            if _compat.storage_id(tensor) != storage.ref.key:
                operand = self.tape.operand(tensor, reads=False)
                if isinstance(operand, Output) and operand.record.position >= record.position:
                    return None
        return record

    def _write_into(self, record: Record, executed: _ExecutedCall, storage: Storage) -> None:
        assert isinstance(storage.root, Output)
        local = LocalStorage(record, record.outputs[storage.root.index], storage.root_geometry)
        record.calls.append(self._call(executed, {storage.ref.key: local}))
        name, backward, _ = record.name.partition(" (backward)")
        record.name = f"{name}+{executed.label}{backward}"
        record.once = record.once or executed.once

    def _overwrite(self, executed: _ExecutedCall, storage: Storage) -> None:
        (tensor,) = executed.written
        geometry = Geometry.of(tensor)
        record = Record(executed.label, self.tape.in_backward, once=executed.once)
        empty = (geometry.size, geometry.stride, geometry.dtype, tensor.device)
        record.calls.append(Call(operators.new_empty, empty, {}, f"empty {geometry.described()}"))
        record.calls.append(self._call(executed, {storage.ref.key: LocalStorage(record, Local(0, 0), geometry)}))
        self.tape.place(record)
        self.tape.replace_contents(storage, record, Local(0, 0), geometry)

    def _replace(self, other: Operator, executed: _ExecutedCall, storage: Storage) -> None:
        record = Record(operators.label(other), self.tape.in_backward)
        record.calls.append(self._call(executed, function=other))
        self.tape.place(record)
        self.tape.replace_contents(storage, record, Local(0, 0), Geometry.of(executed.written[0]))

    def _write_copies(
        self, executed: _ExecutedCall, storages: Mapping[int, Storage], results: list[tuple[int, torch.Tensor]]
    ) -> None:
        depends = self._depends(executed)
        record = Record(executed.label, self.tape.in_backward, once=executed.once)
        local: dict[int, LocalStorage] = {}
        for key, storage in storages.items():
            described = f"copy {storage.root_geometry.described()} {storage.ref.nbytes}"
            record.calls.append(Call(operators.copy_of, (storage.root,), {}, described))
            local[key] = LocalStorage(record, Local(len(record.calls) - 1, 0), storage.root_geometry)
        record.calls.append(self._call(executed, local))
        self.tape.place(record)
        last = len(record.calls) - 1
        for key, storage in storages.items():
            self.tape.replace_contents(storage, record, local[key].local, storage.root_geometry)
        self.tape.add_outputs(record, last, results, depends)

    def _call(
        self,
        executed: _ExecutedCall,
        local: Mapping[int, LocalStorage] | None = None,
        reads: bool = True,
        function: Callable[..., Any] | None = None,
    ) -> Call:
        """The call with operands where its tensors are; those on storages in `local` are the record's own."""

        def operand(tensor: torch.Tensor) -> Operand:
            own = (local or {}).get(_compat.storage_id(tensor))
            return self.tape.operand(tensor, reads) if own is None else own.view(Geometry.of(tensor))

        function = function or executed.function
        described = f"{function} {_mapped(executed.args, _describe)} {_mapped(executed.kwargs, _describe)}"
        repeats = operators.repeats(executed.label, executed.read)
        return Call(
            function, _mapped(executed.args, operand), _mapped(dict(executed.kwargs), operand), described, repeats
        )


# -- the modes that catch calls --------------------------------------------------------------------------------


class _RecordingMode(_compat.DispatchMode):
    """Hands every operator below autograd to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, tuple(args), dict(kwargs or {}))


#: ways to read a tensor's numbers that do not pass by an operator
_READERS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}


class _ReadingMode(_compat.FunctionMode):
    """Catches what reads the numbers of a tensor and is no operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _READERS:
            return self._recorder.read_numbers(func, _READERS[func], tuple(args), dict(kwargs))
        return func(*args, **kwargs)


# -- small parts -----------------------------------------------------------------------------------------------


def _identity(tensor: torch.Tensor) -> tuple[tuple[int, int], Geometry]:
    """The storage and its size, and what a tensor shows of it."""
    return (_compat.storage_id(tensor), tensor.untyped_storage().nbytes()), Geometry.of(tensor)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _mapped(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments with something else in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, list):
        return [_mapped(item, replace) for item in value]
    if isinstance(value, tuple):
        return tuple(_mapped(item, replace) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, replace) for key, item in value.items()}
    return value


def _describe(tensor: torch.Tensor) -> str:
    return Geometry.of(tensor).described()


def _is_read_elsewhere(tensor: torch.Tensor, executed: _ExecutedCall) -> bool:
    """Whether a call reads the storage that it writes as another argument."""
    others = (t for t in executed.read if t is not tensor)
    return any(_compat.storage_id(t) == _compat.storage_id(tensor) for t in others)


def _computes_alike(operator: Operator, executed: _ExecutedCall) -> bool:
    """Whether an operator's new tensor has the type, shape and strides of the one that is written instead."""

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    (written,) = executed.written
    try:
        result = operator(*_mapped(executed.args, without_data), **_mapped(dict(executed.kwargs), without_data))
    except (RuntimeError, NotImplementedError, TypeError):
        return False  # it does not say
    same = isinstance(result, torch.Tensor) and result.dtype == written.dtype
    return same and result.size() == written.size() and result.stride() == written.stride()
