"""Which parameters several stages of a training step use."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import nn

from ..base.blocks import Block
from .block_meter import parameters_of


@dataclasses.dataclass(frozen=True)
class UsedByModel:
    """Parameters of blocks that the model itself uses.

    places: by the identity of each, the number of calls of blocks before this use in the forward; the gradients of
        these calls come after that of the use.
    unused: calls of blocks that do not use one of them: the block's name, the number of the call, the parameter.
        Hooks compute weights from such parameters before the block runs.
    """

    places: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unused: Set[tuple[str, int, int]] = frozenset()


class ParameterUsers:
    """The stages that use each parameter; gradients of parameters with several users wait for each other in autograd.

    order: the blocks, in the order of their calls. used_by_model: the parameters of blocks that the model itself uses.
    """

    def __init__(self, order: Sequence[Block], used_by_model: UsedByModel) -> None:
        self.used_by_model = used_by_model
        self._used_by_model = used_by_model.places
        self._in_blocks: set[int] = set()
        self._users: dict[int, list[int]] = {}  # by parameter, the places of the calls that use it
        self._places: dict[tuple[int, int], int] = {}  # of calls of blocks
        calls: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        for place, block in enumerate(order):
            call = next(calls[id(block)])
            self._places[id(block), call] = place
            for p in parameters_of(block):
                self._in_blocks.add(id(p))
                if (block.name, call, id(p)) not in used_by_model.unused:
                    self._users.setdefault(id(p), []).append(place)

    def is_in_blocks(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter belongs to a block."""
        return id(parameter) in self._in_blocks

    def is_used_in_blocks(self, parameter: torch.Tensor) -> bool:
        """Whether a block uses a parameter."""
        return id(parameter) in self._users

    def is_shared(self, parameter: torch.Tensor) -> bool:
        """Whether several stages use a parameter."""
        return len(self._users.get(id(parameter), ())) + (id(parameter) in self._used_by_model) > 1

    def with_pending_gradients(self, block: Block, call: int) -> list[nn.Parameter]:
        """Parameters of a block that a later stage uses too, so that a gradient exists when the block's own arrives."""
        place = self._places.get((id(block), call), 0)

        def used_later(p: nn.Parameter) -> bool:
            return place < self._used_by_model.get(id(p), 0) or place != self._users.get(id(p), [place])[-1]

        return [p for p in parameters_of(block) if p.requires_grad and self.is_shared(p) and used_later(p)]

    def ends_pending(self, parameter: nn.Parameter, block: Block, call: int) -> bool:
        """Whether no earlier stage uses a parameter of a block that several use: none of its gradients waits longer."""
        place = self._places.get((id(block), call), 0)
        is_first = place == self._users.get(id(parameter), [place])[0]
        return self.is_shared(parameter) and is_first and self._used_by_model.get(id(parameter), place + 1) > place

    def gradients_around(self, parameter: torch.Tensor, place: int) -> tuple[int, int]:
        """The numbers of a parameter's gradients from blocks before and after its gradient from outside of blocks.

        place: where in the backward that gradient arrives.
        """
        users = self._users.get(id(parameter), [])
        first = sum(user >= place for user in users)
        return first, len(users) - first
