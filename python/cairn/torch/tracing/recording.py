"""Records one step of a model, and proves the record: replayed, it must give the step's results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..base import _compat
from ..base.errors import Unsupported
from ..base.tensor_fingerprints import fingerprint
from ..base.tree import unique_tensors_in
from ..profiling.sample import Sample, backward_of
from ..rerun_state.preserve import Buffers, Randomness
from . import interpreter
from .assembly import Results, assembled
from .graph_program import Program
from .recorder import Recorder
from .records import Geometry
from .step_watch import Generators
from .surroundings import Surroundings


@dataclass
class _StepTensors:
    """The tensors that a step leaves."""

    loss: torch.Tensor
    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]  # those that took the place of others


def recorded(
    sample: Sample, surroundings: Surroundings, device: torch.device, keep_output: bool, checks_numbers: bool
) -> tuple[Program, Generators]:
    """The program of a step, and the generators that it was given.

    Call it inside `preserved`, which restores the model after the step.
    """
    recorder = Recorder(sample.model, surroundings.external_tensors, [device], checks_numbers)
    random, buffers = Randomness(device), Buffers(sample.model)
    known = dict(sample.model.named_buffers())
    outside = [(each.name, each.tensor, each.tensor.detach()) for each in surroundings.external_tensors]
    try:
        left = _step(sample, surroundings, recorder, keep_output, known)
        results = _results(recorder, surroundings, left)
        fingerprints = dict(_fingerprints(recorder, left, results))
    finally:
        moved = _restore_data(outside)
        recorder.restore()
    after = Randomness(device)
    _restore_buffers(sample, known)
    _check_undeclared_effects(random, after, buffers, moved)
    del left
    program = assembled(recorder.tape, results)
    random.restore_torch()
    _prove(program, fingerprints, after, device)
    return program, recorder.generators


def _step(
    sample: Sample, surroundings: Surroundings, recorder: Recorder, keep_output: bool, known: dict[str, torch.Tensor]
) -> _StepTensors:
    with recorder.recording():
        try:
            output, loss = sample.forward()
        except _compat.operator_capture_error() as error:  # where Dynamo must trace nothing of the recorder
            named = re.search(r"Higher Order Operator: (\S+)", str(error))
            name = named.group(1) if named else "an operator of the step"
            reason = "is a higher-order operator, and runs other operators where none is recorded"
            raise Unsupported(f"{name} cannot be traced: it {reason}") from error
        if loss is None:
            raise ValueError("the model's output has no loss: give loss_fn=, which makes the loss from it")
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on anything that wants a gradient")
        recorder.tape.in_backward = True
        backward_of(output, loss)
    left = _StepTensors(loss.detach(), [], {}, {})
    if keep_output:
        left.outputs = [tensor.detach() for tensor in unique_tensors_in(output)]
    for name, tensor in surroundings.differentiable():
        if tensor.grad is not None:
            left.grads[name] = tensor.grad
            tensor.grad = None
    for name, buffer in sample.model.named_buffers():
        if name in known and buffer is not known[name]:
            left.buffers[name] = buffer.detach()
    return left


def _results(recorder: Recorder, surroundings: Surroundings, left: _StepTensors) -> Results:
    """Where the results are in the record."""
    written = dict(recorder.tape.written())
    written.update((surroundings.index[name], recorder.tape.operand(tensor)) for name, tensor in left.buffers.items())
    return Results(
        recorder.tape.operand(left.loss),
        [recorder.tape.operand(tensor) for tensor in left.outputs],
        {name: recorder.tape.operand(grad) for name, grad in left.grads.items()},
        sorted(written.items(), key=lambda pair: pair[0]),
    )


def _fingerprints(recorder: Recorder, left: _StepTensors, results: Results) -> Iterator[tuple[str, int]]:
    """The results of the recorded step, under the names of `Outcome.named`."""
    yield "the loss", fingerprint(left.loss)
    for name, grad in left.grads.items():
        yield f"the gradient of {name}", fingerprint(grad)
    for index, output in enumerate(left.outputs):
        yield f"output {index}", fingerprint(output)
    for index, _ in results.written:
        outside = recorder.tape.externals[index]
        yield outside.name, fingerprint(left.buffers.get(outside.name, outside.tensor))


def _restore_buffers(sample: Sample, known: dict[str, torch.Tensor]) -> None:
    for path, buffer in known.items():
        owner, _, name = path.rpartition(".")
        sample.model.get_submodule(owner)._buffers[name] = buffer


def _restore_data(outside: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """Restores the storage of tensors whose `data` was set; returns their names."""
    moved = []
    for name, tensor, before in outside:
        if Geometry.of(tensor) != Geometry.of(before) or _compat.storage_id(tensor) != _compat.storage_id(before):
            tensor.data = before
            moved.append(name)
    return moved


def _check_undeclared_effects(before: Randomness, after: Randomness, buffers: Buffers, moved: list[str]) -> None:
    """Refuse a step with effects that operators do not declare."""
    if moved:
        raise Unsupported(f"the step sets the data of {moved[0]}, which no operator shows")
    foreign = before.foreign_differs(after)
    if foreign:
        raise Unsupported(f"the step draws from {' and '.join(foreign)}, which no recorded operation stands for")
    changed = buffers.changed()
    if changed:
        raise Unsupported(f"the step writes into the buffer {changed[0]!r} in a way that no operator shows")


def _prove(program: Program, fingerprints: dict[str, int], after: Randomness, device: torch.device) -> None:
    """Runs the program and compares its results with those of the recorded step."""
    externals = [outside.tensor for outside in program.externals]
    outcome = interpreter.run(program, program.store_all(), externals, device, None).outcome
    for name, tensor in outcome.named(program.externals):
        if fingerprint(tensor) != fingerprints[name]:
            raise Unsupported(
                f"the recorded operations give another result than the step did ({name} differs): the step does "
                "something that its operators do not show, such as calling foreign code or setting the random state, "
                "as torch.utils.checkpoint does"
            )
    if after.torch_differs(Randomness(device)):
        raise Unsupported("the recorded operations draw other random numbers than the step did")
