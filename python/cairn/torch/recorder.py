"""Records a training step, operator by operator, while it runs as ever: below autograd, and autograd's own work too.

The step that is recorded is the real one on real tensors, so nothing is approximated and nothing is captured
symbolically: the program has the operators that plain training calls, in its order, on its shapes and strides.

What is looked up is never a tensor object but what it shows: a storage, and the part of it that the tensor covers. A
tensor that autograd saved and unpacked is thereby the value that it was, and a view that somebody made elsewhere can be
made again. Each storage has a *root*, the result that made it; a write gives it a new root. A write is recorded as

* part of the operation that made the storage, where nobody has read that and the operation does not have to move for it
  (a fresh tensor that is filled; an activation in place on a normalisation's output);
* the operator's form that returns a new tensor, where it writes a whole tensor (add for add_);
* else the same write into a copy of the storage.

So the recorded program never writes into what somebody else may read, and any operation may be computed again.

What cannot be recorded is refused with its name: reading numbers out of tensors (the program would branch on them),
tensors without one plain storage, and tensors that come from elsewhere in the middle of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import _compat, memory, operators
from .errors import Unsupported
from .graph_program import Call, External, Local, Outside
from .operators import Facts, Operator
from .records import Geometry, LocalStorage, Operand, Output, Record, showing
from .step_watch import Draws, Generators, Places, existing_storages


@dataclass
class _Storage:
    ref: _compat.StorageRef
    device: torch.device
    root: Operand
    root_shows: Geometry
    shows: dict[Geometry, Operand]
    depends: bool  # on parameters, inputs, random numbers: on more than the program text
    externals: list[int] = field(default_factory=list)
    was_read: bool = False
    was_written: bool = False

    def replace(self, root: Operand, shows: Geometry) -> None:
        """A write: the storage has new contents, which nobody has read."""
        self.root, self.root_shows, self.shows = root, shows, {shows: root}
        self.was_read, self.was_written = False, True


class Recorder:
    """Records what runs inside `recording`; see the top of this file."""

    def __init__(self, model: nn.Module, outside: Sequence[Outside], devices: Sequence[torch.device]) -> None:
        self.records: list[Record] = []
        self.externals: list[Outside] = []
        self.in_backward = False
        self._storages: dict[int, _Storage] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # what a write into an external replaced
        self._storage_count = 0
        self._places = Places(model)
        self.generators = Generators()
        self._draws = Draws(devices)
        self._existing = {ref.key: ref for ref in existing_storages()}
        for each in outside:
            self._add_external(each)

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

    # what the step made

    def result(self, tensor: torch.Tensor) -> Output | External:
        """Where in the record a tensor is; it counts as read."""
        found = self._operand(tensor, None)
        assert not isinstance(found, Local)
        return found

    def written(self) -> list[tuple[int, Output | External]]:
        """The tensors from outside that the step wrote into, and where their new contents are."""
        found = []
        for state in list(self._storages.values()):
            for index in state.externals if state.was_written else []:
                if self.externals[index].is_literal:
                    continue  # the next step makes it anew
                operand = self._shown_by(state, Geometry.of(self.externals[index].tensor))
                assert not isinstance(operand, Local)
                found.append((index, operand))
        return sorted(found, key=lambda pair: pair[0])

    # one call

    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator as ever and records it."""
        facts = operators.facts_of(operator)
        self._check(operator, args, kwargs)
        written = facts.tensors_written(args, kwargs)
        self._note_before(written)
        before = [(tensor, _compat.storage_id(tensor), Geometry.of(tensor)) for tensor in written]
        drawing = self._draws.before()
        generator = kwargs.get("generator")
        if generator is not None:
            self.generators.note(generator)
        result = operator(*args, **kwargs)
        once = self._draws.changed(drawing) or facts.is_collective or generator is not None
        if facts.is_literal:
            self._literal(args, result)
        elif written:
            if any(_compat.storage_id(t) != key or Geometry.of(t) != shows for t, key, shows in before):
                raise self._refusal(operator, "gives a tensor another shape or storage")
            self._write(operator, facts, args, kwargs, written, result, once)
        else:
            self._compute(operator, args, kwargs, result, once)
        return result

    def check_numbers(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses to read numbers that are more than the program's text: the program may branch on them."""
        for tensor in tensors:
            state = self._storages.get(_compat.storage_id(tensor))
            if state is None or state.depends:
                raise Unsupported(
                    f"{what}{self._places.here()} reads numbers out of a tensor of shape {list(tensor.shape)} that "
                    "depends on parameters, inputs or random numbers: what the step does next may depend on them, "
                    "and one graph cannot stand for that"
                )

    def _check(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(operators.tensors_of([*args, *kwargs.values()]))
        for tensor in tensors:
            self._check_plain(operator, tensor)
        if operators.reads_numbers(operator, args):
            for tensor in tensors:
                self._state(tensor, operator)
            self.check_numbers(str(operator), tensors)

    def _check_plain(self, operator: Operator, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise self._refusal(operator, f"works on a {type(tensor).__name__}, which is more than a plain tensor")
        if not memory.has_storage(tensor):
            raise self._refusal(operator, f"works on a tensor of layout {tensor.layout}, which has no one storage")

    def _refusal(self, operator: Operator | None, reason: str) -> Unsupported:
        return Unsupported(f"{operator or 'the step'}{self._places.here()} cannot be traced: it {reason}")

    # kinds of calls

    def _literal(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """A tensor of numbers in the program's text; what torch was given is what it gives back."""
        for tensor in {_compat.storage_id(t): t for t in (args[0], result)}.values():
            if _compat.storage_id(tensor) not in self._storages:
                name = f"literal of shape {list(tensor.shape)}"
                self._add_external(Outside(name, tensor.detach(), is_literal=True)).depends = False

    def _compute(self, operator: Operator, args: Any, kwargs: Any, result: Any, once: bool) -> None:
        results = _results_of(result)
        tensors = [(i, t) for i, t in enumerate(results) if isinstance(t, torch.Tensor)]
        if not tensors:
            return  # it says something about shapes
        for _, tensor in tensors:
            self._check_plain(operator, tensor)
        read = {_compat.storage_id(t) for t in operators.tensors_of([*args, *kwargs.values()])}
        for tensor in operators.tensors_of([*args, *kwargs.values()]):
            self._state(tensor, operator)
        views = [_compat.storage_id(t) in read for _, t in tensors]
        if any(views) and not all(views):
            raise self._refusal(operator, "returns both new tensors and views of its arguments")
        if any(views):
            self._view(operator, args, kwargs, tensors)
            return
        call = self._call(operator, args, kwargs)
        record = self._record(operators.label(operator))
        record.calls.append(call)
        record.once = once
        self._hand_on(record, 0, tensors, once or self._depends(args, kwargs))

    def _view(self, operator: Operator, args: Any, kwargs: Any, tensors: list[tuple[int, torch.Tensor]]) -> None:
        state = self._state(tensors[0][1], operator)
        if all(Geometry.of(tensor) in state.shows for _, tensor in tensors):
            return  # it shows what is there already
        call = self._call(operator, args, kwargs, reads=False)
        record = self._record(operators.label(operator))
        record.calls.append(call)
        record.base = state.root
        for index, tensor in tensors:
            shows = Geometry.of(tensor)
            made = record.hand_on(Local(0, index), shows)
            state.shows.setdefault(shows, made)

    def _write(
        self,
        operator: Operator,
        facts: Facts,
        args: Any,
        kwargs: Any,
        written: list[torch.Tensor],
        result: Any,
        once: bool,
    ) -> None:
        states = {_compat.storage_id(t): self._state(t, operator) for t in written}
        made = [
            (i, t)
            for i, t in enumerate(_results_of(result))
            if isinstance(t, torch.Tensor) and _compat.storage_id(t) not in states
        ]
        depends = once or self._depends(args, kwargs)
        if len(states) == 1 and not made:
            (state,) = states.values()
            self._write_one(operator, facts, args, kwargs, written, state, once)
            state.depends = depends if facts.overwrites else state.depends or depends
            return
        self._write_copies(operator, args, kwargs, states, made, once)
        for state in states.values():
            state.depends = state.depends or depends

    def _write_one(
        self,
        operator: Operator,
        facts: Facts,
        args: Any,
        kwargs: Any,
        written: list[torch.Tensor],
        state: _Storage,
        once: bool,
    ) -> None:
        record = self._unread_maker(state, args, kwargs, once)
        if record is not None:
            self._write_into(record, operator, args, kwargs, state)
            record.once = record.once or once
            return
        whole = len(written) == 1 and Geometry.of(written[0]).covers(state.ref.nbytes)
        if whole and facts.overwrites and not self._reads_again(args, kwargs, written[0]):
            self._overwrite(operator, args, kwargs, written[0], state, once)
            return
        other = operators.out_of_place(operator) if whole and not once else None
        if other is not None and _computes_alike(other, args, kwargs, written[0]):
            self._replace(other, args, kwargs, written[0], state)
            return
        self._write_copies(operator, args, kwargs, {state.ref.key: state}, [], once)

    def _unread_maker(self, state: _Storage, args: Any, kwargs: Any, once: bool) -> Record | None:
        """The record that made a storage which nobody has read, if a write can join it where it stands."""
        root = state.root
        if state.was_read or not isinstance(root, Output):
            return None
        record = root.record
        if record.base is not None or (record.is_backward != self.in_backward):
            return None
        if once and any(later.once for later in self.records[record.position + 1 :]):
            return None  # random numbers are drawn in the order of the step
        for tensor in operators.tensors_of([*args, *kwargs.values()]):
            if _compat.storage_id(tensor) != state.ref.key:
                operand = self._operand(tensor, None, reads=False)
                if isinstance(operand, Output) and operand.record.position >= record.position:
                    return None
        return record

    def _write_into(self, record: Record, operator: Operator, args: Any, kwargs: Any, state: _Storage) -> None:
        root = state.root
        assert isinstance(root, Output)
        local = LocalStorage(record, record.outputs[root.index], state.root_shows)
        record.calls.append(self._call(operator, args, kwargs, {state.ref.key: local}))
        record.name = f"{record.name}+{operators.label(operator)}"

    def _reads_again(self, args: Any, kwargs: Any, tensor: torch.Tensor) -> bool:
        same = [t for t in operators.tensors_of([*args, *kwargs.values()]) if t is not tensor]
        return any(_compat.storage_id(t) == _compat.storage_id(tensor) for t in same)

    def _overwrite(
        self, operator: Operator, args: Any, kwargs: Any, tensor: torch.Tensor, state: _Storage, once: bool
    ) -> None:
        shows = Geometry.of(tensor)
        record = self._record(operators.label(operator))
        made = (shows.size, shows.stride, shows.dtype, tensor.device)
        record.calls.append(Call(operators.fresh, made, {}, f"fresh {shows.described()}"))
        local = LocalStorage(record, Local(0, 0), shows)
        record.calls.append(self._call(operator, args, kwargs, {state.ref.key: local}))
        record.once = once
        self._becomes(state, record, Local(0, 0), shows)

    def _replace(self, operator: Operator, args: Any, kwargs: Any, tensor: torch.Tensor, state: _Storage) -> None:
        call = self._call(operator, args, kwargs)
        record = self._record(operators.label(operator))
        record.calls.append(call)
        self._becomes(state, record, Local(0, 0), Geometry.of(tensor))

    def _write_copies(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        states: Mapping[int, _Storage],
        made: list[tuple[int, torch.Tensor]],
        once: bool,
    ) -> None:
        depends = once or self._depends(args, kwargs)
        record = Record(-1, operators.label(operator), self.in_backward, once=once)
        locals_: dict[int, LocalStorage] = {}
        for key, state in states.items():
            state.was_read = True
            record.calls.append(
                Call(operators.copied, (state.root,), {}, f"copied {state.root_shows.described()} {state.ref.nbytes}")
            )
            locals_[key] = LocalStorage(record, Local(len(record.calls) - 1, 0), state.root_shows)
        record.calls.append(self._call(operator, args, kwargs, locals_))
        self._place(record)
        last = len(record.calls) - 1
        for key, state in states.items():
            self._becomes(state, record, locals_[key].local, state.root_shows)
        self._hand_on(record, last, made, depends)

    # operands

    def _call(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        locals_: Mapping[int, LocalStorage] | None = None,
        reads: bool = True,
    ) -> Call:
        """The call with operands where its tensors are; those on storages in `locals_` are local to the record."""

        def operand(tensor: torch.Tensor) -> Operand:
            local = (locals_ or {}).get(_compat.storage_id(tensor))
            return self._operand(tensor, operator, reads) if local is None else local.shown(Geometry.of(tensor))

        described = f"{operator} {_mapped(args, _describe)} {_mapped(kwargs, _describe)}"
        return Call(operator, _mapped(tuple(args), operand), _mapped(dict(kwargs), operand), described)

    def _operand(self, tensor: torch.Tensor, operator: Operator | None, reads: bool = True) -> Operand:
        state = self._state(tensor, operator)
        state.was_read = state.was_read or reads
        return self._shown_by(state, Geometry.of(tensor))

    def _shown_by(self, state: _Storage, shows: Geometry) -> Operand:
        found = state.shows.get(shows)
        if found is not None:
            return found
        if shows.is_conj or shows.is_neg or state.root_shows.is_conj or state.root_shows.is_neg:
            raise self._refusal(None, "reads a lazily conjugated or negated view that it did not make")
        record = self._record("view")
        record.base = state.root
        record.calls.append(showing(state.root, shows))
        made = state.shows[shows] = record.hand_on(Local(0, 0), shows)
        return made

    def _state(self, tensor: torch.Tensor, operator: Operator | None) -> _Storage:
        key = _compat.storage_id(tensor)
        state = self._storages.get(key)
        if state is not None:
            return state
        if key not in self._existing:
            raise self._refusal(operator, "reads a tensor that was made in this step, but not by torch's operators")
        return self._add_external(Outside(f"tensor of shape {list(tensor.shape)} from elsewhere", tensor.detach()))

    def _depends(self, args: Any, kwargs: Any) -> bool:
        tensors = operators.tensors_of([*args, *kwargs.values()])
        return any(self._storages[_compat.storage_id(tensor)].depends for tensor in tensors)

    def _add_external(self, outside: Outside) -> _Storage:
        shows, here = Geometry.of(outside.tensor), External(len(self.externals))
        key = _compat.storage_id(outside.tensor)
        self.externals.append(outside)
        state = self._storages.get(key)
        if state is None:
            state = _Storage(_compat.StorageRef(outside.tensor), outside.tensor.device, here, shows, {}, depends=True)
            self._storages[key] = state
        state.externals.append(here.index)
        state.shows.setdefault(shows, here)
        return state

    def _note_before(self, written: list[torch.Tensor]) -> None:
        """Contents of tensors from outside before the first write into them."""
        for tensor in written:
            state = self._state(tensor, None)
            if state.externals and not state.was_written:
                self._before += [(t.detach(), t.detach().clone()) for t in self._outside(state)]

    def _outside(self, state: _Storage) -> list[torch.Tensor]:
        return [self.externals[index].tensor for index in state.externals]

    # records

    def _record(self, name: str) -> Record:
        record = Record(-1, name, self.in_backward)
        self._place(record)
        return record

    def _place(self, record: Record) -> None:
        record.position = len(self.records)
        record.name = self._places.named(record.name, self.in_backward)
        self.records.append(record)

    def _hand_on(self, record: Record, call: int, tensors: list[tuple[int, torch.Tensor]], depends: bool) -> None:
        """New storages become results of a record."""
        for index, tensor in tensors:
            key, shows = _compat.storage_id(tensor), Geometry.of(tensor)
            state = self._storages.get(key)
            made = record.hand_on(Local(call, index), shows)
            if state is None or not isinstance(state.root, Output) or state.root.record is not record:
                ref = _compat.StorageRef(tensor)
                state = self._storages[key] = _Storage(ref, tensor.device, made, shows, {}, depends)
                self._storage_count += 1
            root = state.root
            assert isinstance(root, Output)
            shared = root.index < len(record.storages)
            number = record.storages[root.index][0] if shared else self._storage_count
            record.storages.append((number, memory.storage_bytes(tensor)))
            state.shows.setdefault(shows, made)

    def _becomes(self, state: _Storage, record: Record, local: Local, shows: Geometry) -> None:
        """A result of a record becomes the new contents of a storage."""
        self._storage_count += 1
        made = record.hand_on(local, shows)
        record.storages.append((self._storage_count, memory.allocated_bytes(state.ref.nbytes, state.device)))
        state.replace(made, shows)


# -- the modes that catch calls --------------------------------------------------------------------------------


class _RecordingMode(TorchDispatchMode):
    """Hands every operator below autograd to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, tuple(args), dict(kwargs or {}))


#: ways to read a tensor's numbers that do not pass by an operator
_READERS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}


class _ReadingMode(TorchFunctionMode):
    """Catches what reads the numbers of a tensor and is no operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            self._recorder.check_numbers(_READERS[func], [args[0]])
        return func(*args, **(kwargs or {}))


# -- small parts -------------------------------------------------------------------------------------------------


def _results_of(result: Any) -> list[Any]:
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


def _computes_alike(operator: Operator, args: Any, kwargs: Any, written: torch.Tensor) -> bool:
    """Whether an operator's new tensor has the type, shape and strides of the one that is written instead."""

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        result = operator(*_mapped(args, without_data), **_mapped(kwargs, without_data))
    except (RuntimeError, NotImplementedError, TypeError):
        return False  # it does not say
    same = isinstance(result, torch.Tensor) and result.dtype == written.dtype
    return same and result.size() == written.size() and result.stride() == written.stride()
