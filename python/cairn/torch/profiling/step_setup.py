"""What every step of a sample begins with, so that steps can be compared."""

from __future__ import annotations

import torch
from torch import nn

from ..rerun_state.attributes import Attributes
from ..rerun_state.preserve import Buffers, Parameters, Randomness
from .sample import Sample


class Beginning:
    """The random state, the buffers, the parameters that a forward writes, and what is in attributes: of the model, and
    of all else that its step uses.
    """

    def __init__(self, sample: Sample, device: torch.device, parameters: Parameters | None = None) -> None:
        """parameters: has watched a forward; None where no parameters are written."""
        self._parameters, self._own = parameters, list(sample.model.parameters())
        self._modules = nn.ModuleList([sample.model, *sample.others])
        self._random, self._buffers = Randomness(device), Buffers(self._modules)
        self._attributes: Attributes | None = None

    def restore(self, gradients_exist: bool) -> None:
        """A step begins, onto gradients that exist already or creating them."""
        self._random.restore()
        self._buffers.restore()
        if self._parameters is not None:
            self._parameters.restore()
        for p in self._own:
            p.grad = torch.zeros_like(p) if gradients_exist and p.requires_grad else None
        self._attributes = Attributes(self._modules.modules(), with_large=True)

    def leave(self) -> None:
        """It has ended: what it left in attributes goes, and its gradients do."""
        if self._attributes is not None:
            self._attributes.restore()
        for p in self._own:
            p.grad = None
