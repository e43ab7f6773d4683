"""How little any choice of kept tensors could cost at a given peak: a bound, from the times of a block's operations.

Take the moment when the backward of some stage begins. Whatever the schedule, a set S of tensors is in memory then.
What the backwards to come read and S has not is computed after that moment: every operation that this needs, at least
once. So what is recomputed takes at least what it takes with the best set of that size, over all blocks together. A
block's argument is the output of the block before, which counts among what that one keeps or recomputes; so blocks come
apart, and the best set is one point on the hull of (bytes, time) of each block, at one slope for all. The hulls are
those of `block_options.ideal_choices`: minimum cuts, as many options as there are, no cost but that of the operations.

What else is in memory at that moment is taken from the profile: what the stages keep that keep everything, gradients of
weights that wait, and the least that the stage needs whose backward begins. The highest bound of all moments counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from cairn.torch.base.tree import Tree
from cairn.torch.planning.step_profile import Profile
from cairn.torch.selective.block_graph import BlockGraph
from cairn.torch.selective.block_options import Choice, ideal_choices
from cairn.torch.selective.graph_recorder import BlockRecorder
from torch import nn

RUNS = 5  # of the block; the least time of each operation counts


class Bound:
    """The least overhead, as a share of the plain step, at any peak.

    profile: of a step whose blocks with options are all alike. hull: of one of them.
    """

    def __init__(self, profile: Profile, hull: Sequence[Choice]) -> None:
        self._chain = profile.chain("activations")
        self._hull = hull
        self._selective = [number for number, stage in enumerate(profile.stages) if stage.options]
        assert len({profile.stages[number].digest for number in self._selective}) == 1, "the blocks are not alike"
        times = [option for stage in self._chain["stages"] for option in stage["options"][:1]]
        self._plain_ns = sum(option["forward_ns"] + option["backward_ns"] for option in times)

    def overhead(self, peak_bytes: int) -> float:
        """Infinite where no choice is small enough."""
        moments = [*self._selective[1:], len(self._chain["stages"]) - 1]
        return max(self._at(moment, peak_bytes) for moment in moments) / self._plain_ns

    def _at(self, moment: int, peak_bytes: int) -> float:
        """The least time of recomputing, by what can be there when the backward of a stage begins."""
        blocks = sum(number < moment for number in self._selective)
        return blocks * self._time((peak_bytes - self._others(moment)) / blocks)

    def _others(self, moment: int) -> int:
        """What is there beside what the blocks with options before a stage keep."""
        stages = self._chain["stages"]
        total = self._chain["fixed_bytes"] + self._chain["input_bytes"]
        total += sum(s["options"][0]["saved_bytes"] for i, s in enumerate(stages[:moment]) if i not in self._selective)
        total += stages[moment]["grad_bytes"] + sum(stage["weight_grad_bytes"] for stage in stages[moment + 1 :])
        result = stages[moment - 1]["grad_bytes"] + stages[moment]["weight_grad_bytes"]
        return int(
            total
            + min(o["saved_bytes"] + max(0, result + o["backward_workspace_bytes"]) for o in stages[moment]["options"])
        )

    def _time(self, nbytes: float) -> float:
        """The hull at a size."""
        for larger, smaller in itertools.pairwise(self._hull):
            if smaller.kept_bytes <= nbytes:
                share = (larger.kept_bytes - min(nbytes, larger.kept_bytes)) / (larger.kept_bytes - smaller.kept_bytes)
                return larger.recompute_ns + share * (smaller.recompute_ns - larger.recompute_ns)
        return float("inf")


def bound_of(profile: Profile, model: nn.Module, forward: Any) -> Bound:
    """Runs the model's forward, and the first block with options in it some times more."""
    name = next(stage.name for stage in profile.stages if stage.options)
    return Bound(profile, ideal_choices(_recorded(model.get_submodule(name), forward)))


def _recorded(block: nn.Module, forward: Any) -> BlockGraph:
    """The block's operations, with the least time of each in some runs."""
    calls: list[tuple[Any, Any]] = []
    handle = block.register_forward_pre_hook(lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.random.fork_rng(devices=[]):
        forward()
        handle.remove()
        graphs = [_run(block, *calls[0]) for _ in range(RUNS)]
    for operations in zip(*(graph.operations for graph in graphs), strict=True):
        operations[0].nanoseconds = min(operation.nanoseconds for operation in operations)
    return graphs[0]


def _run(block: nn.Module, args: Any, kwargs: Any) -> BlockGraph:
    tree = Tree.of((args, kwargs))
    leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in tree.leaves]
    args, kwargs = tree.build(leaves)
    recorder = BlockRecorder(leaves, list(block.parameters()), list(block.buffers()), timed=leaves[0].device)

    def pack(tensor: torch.Tensor) -> None:
        with recorder.paused():
            recorder.pack(tensor)

    def unpack(_: None) -> torch.Tensor:
        raise AssertionError("there is no backward")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), recorder:
        output = block(*args, **kwargs)
    return recorder.graph(output)
