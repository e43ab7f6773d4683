"""Two ranks whose parameters lie in parts: what is done on each, started by `on_two_ranks` (gloo, on the CPU)."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base.memory import CpuMeter
from cairn.torch.base.stage_measure import StageMeasure
from cairn.torch.compiled import region_levels, region_options
from cairn.torch.compiled.compiled_model import known
from torch import distributed, nn

WIDTH, RANKS = 16, 2
SECONDS = 240  # for all tasks
ALONE_SECONDS = 30  # for a rank to answer after an error of the other
TRACE_SECONDS = 1  # for a rank to write where it is


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Pair(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    """Layers in pairs; the blocks that are found are the layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = pair(x)
        return self.head(self.norm(x))


def pairs(model: Net, **options: Any) -> Net:
    """What is sharded as one is larger than the blocks that are found."""
    from torch.distributed.fsdp import fully_shard

    for pair in model.pairs:
        fully_shard(pair, **options)
    fully_shard(model)
    return model


def lists(model: Net) -> Net:
    """Several layers are sharded as one."""
    from torch.distributed.fsdp import fully_shard

    for pair in model.pairs:
        fully_shard(list(pair.layers))
    fully_shard(model)
    return model


def norm_and_head(model: Net) -> Net:
    """Layers by themselves, norm and head as one."""
    from torch.distributed.fsdp import fully_shard

    for pair in model.pairs:
        for layer in pair.layers:
            fully_shard(layer)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    return model


def root(model: Net, **options: Any) -> Net:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, **options)
    return model


def tensor_parallel(model: Net, mesh: Any = None) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,)) if mesh is None else mesh
    for pair in model.pairs:
        for layer in pair.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def both(model: Net) -> Net:
    """Tensor parallelism inside of what FSDP2 shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(model, mesh["tensor"])
    for pair in model.pairs:
        for layer in pair.layers:
            fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def planned(shard: Callable[[Net], Net], **options: Any) -> list[str]:
    """The blocks of a sharded model that was planned, after two steps with the bits of plain training."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    shard(model), shard(plain)
    x = torch.randn(32, WIDTH)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, **options)
    plan = ct.plan(profile, ct.plan(profile, "1GiB").least_budget_bytes)
    assert not plan.is_plain
    everyone: list[Any] = [None] * RANKS
    distributed.all_gather_object(everyone, plan.to_json())
    with ct.apply(model, ct.Plan.from_json(everyone[0])), warnings.catch_warnings():  # ranks must run the same plan
        warnings.filterwarnings("error", message="the parameters of the planned")  # they have not grown
        for _ in range(2):
            for each in (model, plain):
                each(x).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs)
    return [ref.name for ref in plan.stages if ref.is_block]


def predicted(shard: Callable[[Net], Net]) -> list[bool]:
    """Whether steps of a sharded model take what their plans predict, within a percent."""
    width = 96
    model, x, found = shard(Net(width)), torch.randn(256, width), []
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1, inside=False)
    top = ct.plan(profile, "1GiB", gradients="created")
    least, most = top.least_budget_bytes, top.plain_peak_bytes
    there = sum(p.to_local().nbytes for p in model.parameters()) + x.nbytes
    for budget in (least, (least + most) // 2, "1GiB"):
        plans: list[Any] = [None] * RANKS
        distributed.all_gather_object(plans, ct.plan(profile, budget, gradients="created").to_json())
        plan = ct.Plan.from_json(plans[0])
        with ct.apply(model, plan):
            peak = there + min(_rise(model, x) for _ in range(8))
        found.append(abs(peak / plan.created_peak_bytes - 1) < 0.01)
    return found


def _rise(model: Net, x: torch.Tensor) -> int:
    """What a step that creates its gradients allocates at most.

    A buffer that gloo frees in a thread of its own is counted as if it stayed, in some steps.
    """
    meter = CpuMeter()
    with meter:
        first = meter.mark()
        model(x).sum().backward()
        last = meter.mark()
        model.zero_grad()
    return meter.peak(first, last)


def compiled(shard: Callable[[Net], Net]) -> list[bool]:
    """Whether a sharded model of compiled blocks keeps to budgets, one plan, and the bits of plain training.

    The first: whether all ranks measure the same levels. The second: whether the plan counts what a rank has of the
    parameters.
    """
    region_levels.MAX_OPTIONS = 3
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    shard(model), shard(plain)
    x, found = torch.randn(256, WIDTH), []

    def plan(budget: Any) -> Any:
        ct.compile(model, x, budget=budget, kernels="eager", loss_fn=torch.sum)
        return ct.report(model).regions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_options, "useful_levels", _fewer_on_the_second_rank)
        if distributed.get_rank():  # measures as if no block were like another
            patch.setattr(StageMeasure, "signature", lambda stage: (stage.name,))
        top = plan("1GiB")
    levels: list[Any] = [None] * RANKS
    distributed.all_gather_object(levels, [code.backend.levels for code in known(model).regions.codes])
    found.append(levels[0] == levels[1] and len(levels[0][0]) > 1)
    found.append(top.plan.resident["parameters"] == sum(p.to_local().nbytes for p in model.parameters()))
    for budget in (top.least_budget_bytes, (top.least_budget_bytes + top.plain_peak_bytes) // 2):
        made = plan(budget)
        found.append(made.measured_peak_bytes <= budget and not made.plan.is_plain)
        hashes: list[Any] = [None] * RANKS
        distributed.all_gather_object(hashes, made.plan.hash)
        found.append(len(set(hashes)) == 1)
        for each in (model, plain):
            each(x).sum().backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(all(torch.equal(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs))
    ct.compile(model, x, plan=made, loss_fn=torch.sum)
    again = ct.report(model).regions
    followed = again is not made and again.plan.hash == made.plan.hash
    found.append(followed and again.measured_peak_bytes <= made.plan.budget_bytes)
    try:
        plan(1000)
    except ct.InfeasibleBudget as error:
        found.append((error.least_bytes or 0) > 1000)
    return found


def checkpointed(shard: Callable[[Net], Net]) -> list[Any]:
    """Whether ranks follow one plan, within the smallest of their budgets and with the bits of plain training; what a
    step with larger inputs says, and what two plans that are not the same say.
    """
    torch.manual_seed(0)
    model, plain, x = Net(), Net(), torch.randn(32, WIDTH)
    plain.load_state_dict(model.state_dict())
    shard(model), shard(plain)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    least: list[Any] = [None] * RANKS
    distributed.all_gather_object(least, ct.plan(profile, "1GiB").least_budget_bytes)
    room = int(1.05 * max(least))  # a rank's profile differs a little from the one before
    budget = "1GiB" if distributed.get_rank() else room
    ct.checkpoint(model, x[: -1 - distributed.get_rank()], budget=budget, loss_fn=torch.sum, passes=1)
    made, hashes = ct.handle(model).plan, list[Any]([None] * RANKS)
    distributed.all_gather_object(hashes, made.hash)
    for _ in range(2):
        for each in (model, plain):
            each(x[:-1]).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    exact = all(torch.equal(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs)
    with pytest.raises(ct.PlanMismatch) as larger:
        model(x)
    ct.handle(model).remove()
    ct.apply(model, made if distributed.get_rank() else ct.plan(profile, "1GiB"))
    with pytest.raises(ct.PlanMismatch) as other:
        model(x[:-1])
    one = len(set(hashes)) == 1 and made.budget_bytes == room and not made.is_plain
    return [one, exact, "follow one plan" in str(larger.value), "follow different plans" in str(other.value)]


def stages(_: Any) -> list[bool]:
    """Whether each rank compiles a stage of its own, which is sharded over its part of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("stage", "data"))["data"]
    torch.manual_seed(0)
    layers, x = 2 + 2 * distributed.get_rank(), torch.randn(32, WIDTH)
    model, plain = (nn.Sequential(*(Layer() for _ in range(layers))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ct.compile(model, x, budget="1GiB", kernels="eager", regions=True, loss_fn=torch.sum)
    for each in (model, plain):
        each(x).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [len(known(model).regions.codes) > 0, all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in pairs)]


def _fewer_on_the_second_rank(curves: Any) -> list[region_levels.Level]:
    """The levels of one rank are fewer, as its times are others."""
    levels = region_levels.useful_levels(curves)
    return levels[: len(levels) - distributed.get_rank()]


def refused(shard: Callable[[Net], Net], **options: Any) -> str:
    model = shard(Net())
    with pytest.raises(ct.Unsupported) as caught:
        ct.profile(model, torch.randn(32, WIDTH), loss_fn=torch.sum, passes=1, **options)
    return str(caught.value)


def pairs_that_stay(model: Net) -> Net:
    return pairs(model, reshard_after_forward=False)


def root_that_goes(model: Net) -> Net:
    return root(model, reshard_after_forward=True)


def planned_before(_: Any) -> str:
    """A plan that was made before the model was made tensor-parallel."""
    model, x = Net(), torch.randn(32, WIDTH)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), "1GiB")
    with pytest.raises(ct.Unsupported) as caught:
        ct.apply(tensor_parallel(model), plan)
    return str(caught.value)


def fails_alone(_: Any) -> None:
    """One rank fails, and the other waits for it."""
    if distributed.get_rank():
        raise ValueError("on one rank")
    distributed.barrier()


#: What a task is called, and with what: by name, for the results.
Tasks = Mapping[str, tuple[Callable[..., Any], Any, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a task returned on one rank, or its error."""

    value: Any
    traceback: str = ""


def _rank(rank: int, folder: Path, tasks: Tasks, parent: Connection) -> None:
    """Do tasks, each when the parent asks for it."""
    with open(folder / f"traces{rank}", "w") as traces:
        faulthandler.register(signal.SIGUSR1, traces, all_threads=True)
        faulthandler.dump_traceback_later(SECONDS + ALONE_SECONDS, exit=True)  # where the parent has ended
        torch.set_num_threads(1)
        store = distributed.FileStore(f"{folder}/store", RANKS)
        limit = datetime.timedelta(seconds=SECONDS)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
        for task, shard, options in tasks.values():
            try:
                answer = Answer(task(shard, **options))
            except BaseException as error:
                answer = Answer(repr(error), traceback.format_exc())
            parent.send(answer)
            parent.recv()  # no rank is ahead, or ends, while the other is at a task
        os._exit(0)  # a group that is freed may wait for threads of its own for ever (torch 2.13)


class _Ranks:
    """The processes, and their answers to one task at a time."""

    def __init__(self, folder: Path, tasks: Tasks) -> None:
        self._folder, self._end = folder, time.monotonic() + SECONDS
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._parents = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=_rank, args=(rank, folder, tasks, other)) for rank, (_, other) in enumerate(pipes)
        ]
        for rank, (process, (_, other)) in enumerate(zip(self._processes, pipes, strict=True)):
            (folder / f"traces{rank}").touch()
            process.start()
            other.close()  # so that a process that ends is noticed

    def found(self, name: str) -> Any:
        """What both ranks find in their next task. Fails if it is not the same."""
        answers: dict[int, Answer] = {}
        while len(answers) < RANKS:
            waiting = {self._parents[rank]: rank for rank in range(RANKS) if rank not in answers}
            seconds = self._end - time.monotonic()
            if any(answer.traceback for answer in answers.values()):  # the other waits for it, mostly for ever
                seconds = min(seconds, ALONE_SECONDS)
            ready = wait(list(waiting), max(0.0, seconds))
            if not ready:
                self._fail(
                    f"task {name!r}: no answer of rank {' and '.join(map(str, waiting.values()))} in time", answers
                )
            for parent in ready:
                answers[waiting[parent]] = self._received(waiting[parent])
        if answers[0].value != answers[1].value:
            self._fail(f"task {name!r}: ranks have other answers", answers)
        if answers[0].traceback:
            print(f"task {name!r}:\n{answers[0].traceback}")
        for parent in self._parents:
            parent.send("next")
        return answers[0].value

    def _received(self, rank: int) -> Answer:
        try:
            answer = self._parents[rank].recv()
            assert isinstance(answer, Answer)
        except (EOFError, OSError):
            self._processes[rank].join(ALONE_SECONDS)
            ended = f"rank {rank} has ended with exit code {self._processes[rank].exitcode}"
            return Answer(ended, ended)
        return answer

    def _fail(self, what: str, answers: Mapping[int, Answer]) -> None:
        """Fails with the answers of ranks, and with where those without one are."""
        parts = [what]
        for rank, process in enumerate(self._processes):
            if rank in answers:
                parts.append(f"rank {rank}: {answers[rank].value!r}\n{answers[rank].traceback}")
                continue
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(TRACE_SECONDS)
            parts.append(f"rank {rank} is here:\n{(self._folder / f'traces{rank}').read_text()}")
        pytest.fail("\n\n".join(parts), pytrace=False)

    def kill(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def on_two_ranks(folder: Path, tasks: Tasks) -> dict[str, Any]:
    """What both ranks find in each task, which must be the same."""
    ranks = _Ranks(folder, tasks)
    try:
        return {name: ranks.found(name) for name in tasks}
    finally:
        ranks.kill()
