"""Repeated runs of one block of a profiled step: recorded, and with its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from ..base import _compat
from ..base.blocks import Block
from ..base.layouts import Layouts
from ..base.tree import Tree
from ..rerun_state.attributes import Attributes
from ..rerun_state.constant_guards import Constants
from ..rerun_state.guards import is_guarded
from ..rerun_state.rng_and_autocast import with_generator
from ..selective.block_graph import BlockGraph
from ..selective.graph_recorder import BlockRecorder
from . import isolated_block
from .block_meter import Rewinding, parameters_of
from .side_outputs import SideOutputs


class BlockRuns:
    """Runs one call of a block alone, any number of times, from the same state."""

    def __init__(
        self,
        block: Block,
        function: Callable[..., Any],
        arguments: isolated_block.Arguments,
        device: torch.device,
        arriving: Layouts,
    ) -> None:
        self.block, self.function, self.arguments, self.device = block, function, arguments, device
        self.arriving = arriving  # layouts of the gradients of outputs and side outputs
        self.pending: Sequence[torch.nn.Parameter] = ()  # that have a gradient when the block's own arrives
        self.shared: Set[int] = frozenset()  # the identities of parameters whose gradients wait for others
        self.devices = (device,) if with_generator(device) else ()
        self._rewinding = Rewinding(block, device)
        self._attributes = Attributes(block.all_modules(), with_large=True)  # each run replaces the same

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Restore generators, buffers and attributes after the body."""
        try:
            yield
        finally:
            self.rewind()

    def rewind(self) -> None:
        self._rewinding.rewind()
        self._attributes.restore()

    def parameters(self) -> list[torch.Tensor | None]:
        return [p for part in self.block.all_modules() for p in part._parameters.values()]

    def buffers(self) -> list[torch.Tensor | None]:
        return [b for part in self.block.all_modules() for b in part._buffers.values()]

    def recorded(self, saving: bool, read_order: list[int] | None = None) -> BlockGraph:
        """The operations of a run; with `saving` also a backward, which records the order of reads of saved tensors."""
        self.rewind()
        constants, buffers, side_outputs = (
            Constants(self.block.all_modules()),
            self.buffers(),
            SideOutputs(self.block.all_modules()),
        )
        args, kwargs = self.arguments.source(isolated_block.Hooks())
        leaves, parts = Tree.of((args, kwargs)).leaves, self.block.all_modules()
        recorder = BlockRecorder(leaves, self.parameters(), self.buffers(), parts, timed=self.device)
        count, has_ended = 0, False
        holds = saving or self.block.has_gradients_inside

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal count
            with recorder.paused():
                recorder.pack(tensor)
                count += 1
                return count - 1, tensor.detach() if holds else None

        def unpack(held: Any) -> torch.Tensor:
            if has_ended and read_order is not None:
                read_order.append(held[0])
            elif not has_ended:
                recorder.read(held[0])
            return held[1]

        with _compat.saved_tensors_hooks(pack, unpack), recorder:
            result = self.arguments.run(self.function, args, kwargs)
        has_ended = True
        graph = recorder.graph(result)
        if not constants.hold(parts, list(map(vars, parts))):
            graph.refuse(f"changes {constants.difference(parts)} in every run")
        for (module, name), value in self._attributes.filled():
            if is_guarded(value):  # and so would have to be as it was
                kind = type(module).__name__
                graph.refuse(f"changes the attribute '{name}' of {kind} in every run")
        if any(now is not before for now, before in zip(self.buffers(), buffers, strict=True)):
            graph.refuse("puts other tensors in the place of its buffers")
        if saving and not graph.refusal:
            self.backward(*side_outputs.root(result, self.arriving))
        torch.clear_autocast_cache()
        return graph

    def backward(self, outputs: list[torch.Tensor], grads: Layouts) -> None:
        root = isolated_block.sink(outputs, isolated_block.Hooks(), grads)
        outputs.clear()
        with isolated_block.as_in_backward(self.device):
            root.backward()
        for parameter in parameters_of(self.block):
            parameter.grad = None
