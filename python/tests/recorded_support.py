"""What tests of recorded operations share."""

from __future__ import annotations

from typing import Any

import torch
from cairn.torch.rerun_state.rng_and_autocast import RandomState
from cairn.torch.selective.block_graph import BlockGraph
from cairn.torch.selective.block_options import KEEP, choices
from cairn.torch.selective.graph_recorder import BlockRecorder
from cairn.torch.selective.recompute import TensorRecompute, compile_recipe
from torch import Tensor
from torch.nn import functional as F


class Recorded:
    """A run of a function, with all that autograd saved and the states of the generator."""

    def __init__(self, function: Any, *arguments: Tensor, parameters: Any = (), buffers: Any = ()) -> None:
        self.arguments = arguments
        self.saved: list[Tensor] = []
        self.states = {0: RandomState(())}
        recorder = BlockRecorder(arguments, parameters, buffers)

        def pack(tensor: Tensor) -> int:
            with recorder.paused():
                recorder.pack(tensor)
                self.saved.append(tensor.detach())
                self.states[len(self.saved)] = RandomState(())
            return len(self.saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: self.saved[index]), recorder:
            self.output = function(*arguments)
        self.graph: BlockGraph = recorder.graph(self.output)

    def argument(self, index: int) -> Tensor:
        return self.arguments[index].detach()

    def parameter(self, index: int) -> Tensor:
        raise AssertionError

    buffer = parameter

    def recompute(self, decisions: str, order: list[int]) -> TensorRecompute:
        recompute = TensorRecompute(compile_recipe(self.graph, decisions, order))
        for index, tensor in enumerate(self.saved):
            assert recompute.saved(index, tensor) == (decisions[index] == KEEP)
        for count in recompute.recipe.states:
            recompute.take_state(count, self.states[count])
        return recompute

    def check(self, decisions: str, order: list[int]) -> None:
        """Recomputes what is not kept, in an order, and compares."""
        recompute = self.recompute(decisions, order)
        for index in order:
            if decisions[index] != KEEP:
                tensor = recompute.tensor(index, self)
                assert tensor is not None and torch.equal(tensor, self.saved[index])
                assert tensor.stride() == self.saved[index].stride()

    def least(self) -> str:
        return choices(self.graph, 100)[-1].decisions


def gelu(x: Tensor) -> Tensor:
    y = F.dropout(0.5 * x * (1 + torch.tanh(x + 0.04 * x.pow(3))), 0.2)
    z = torch.sin(y).mul_(1.5)
    return (F.relu_(z + y) @ y.t()).softmax(-1) * 2


def leaf(*shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape, requires_grad=True)
