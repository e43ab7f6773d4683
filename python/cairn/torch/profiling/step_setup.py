"""The state with which every step of a sample begins, so that steps can be compared."""

from __future__ import annotations

import torch
from torch import nn

from ..rerun_state.attributes import Attributes
from ..rerun_state.preserve import Buffers, Parameters, Randomness
from .sample import Sample


class StepSetup:
    """The state that a step changes: random state, buffers, attributes, and parameters that a forward writes.

    It belongs to the model and to all other modules that its step uses.
    """

    def __init__(self, sample: Sample, device: torch.device, parameters: Parameters | None = None) -> None:
        """parameters: the record of those that a forward writes; None if it writes none."""
        self._parameters, self._own = parameters, list(sample.model.parameters())
        self._modules = nn.ModuleList([sample.model, *sample.others])
        self._random, self._buffers = Randomness(device), Buffers(self._modules)
        self._attributes: Attributes | None = None

    def begin(self, gradients_exist: bool) -> None:
        """Begin a step, which accumulates into existing gradients or creates them."""
        self._random.restore()
        self._buffers.restore()
        if self._parameters is not None:
            self._parameters.restore()
        for p in self._own:
            p.grad = torch.zeros_like(p) if gradients_exist and p.requires_grad else None
        self._attributes = Attributes(self._modules.modules(), with_large=True)

    def end(self) -> None:
        """End the step: restore attributes, and drop its gradients."""
        if self._attributes is not None:
            self._attributes.restore()
        for p in self._own:
            p.grad = None
