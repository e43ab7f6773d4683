"""Which parameters several stages of a training step use."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import nn

from ..base.blocks import Block
from .block_meter import parameters_of


class Owners:
    """Knows who uses which parameters; the gradients of those with several users wait for each other in the engine.

    order: the blocks, as they are called; outside: the identities of their parameters that the model itself uses, too.
    """

    def __init__(self, model: nn.Module, order: Sequence[Block], outside: Set[int] = frozenset()) -> None:
        self.used_outside = frozenset(outside)
        inside = {id(m) for block in order for m in block.parts()}
        between = [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]
        self._users: dict[int, list[tuple[int, int]]] = {}
        calls: dict[int, int] = {}
        for block in order:
            call = calls.get(id(block), 0)
            calls[id(block)] = call + 1
            for p in parameters_of(block):
                self._users.setdefault(id(p), []).append((id(block), call))
        self._outside = outside | set(map(id, between))

    def is_shared(self, parameter: torch.Tensor) -> bool:
        users = self._users.get(id(parameter), [])
        return len(users) + (id(parameter) in self._outside) > 1

    def is_in_blocks(self, parameter: torch.Tensor) -> bool:
        """Whether blocks alone use it."""
        return id(parameter) in self._users and id(parameter) not in self._outside

    def waiting(self, block: Block, call: int) -> list[nn.Parameter]:
        """Parameters of a block that a later stage uses too, so that one gradient is there when its own arrives.

        Where the other user lies outside blocks it may be earlier or later: the worse is assumed.
        """

        def used_later(p: nn.Parameter) -> bool:
            users = self._users.get(id(p), [])
            return p.requires_grad and (id(p) in self._outside or (id(block), call) != users[-1])

        return [p for p in parameters_of(block) if self.is_shared(p) and used_later(p)]
