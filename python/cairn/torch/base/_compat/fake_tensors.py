"""Fake tensors: shapes, types and storages without numbers, on which a step runs without its memory and its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor


class FakeMode(fake_tensor.FakeTensorMode):
    """Makes all tensors of a step fake. A real tensor that the step uses counts as a fake one of its shape."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


#: What operators raise whose result's shape or value depends on numbers.
NEEDS_NUMBERS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def is_faked() -> bool:
    """Whether a step runs here on fake tensors as it would on real ones."""
    return isinstance(_dispatch_mode(_FAKE), FakeMode)


_dispatch_mode: Callable[[Any], Any] = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def accumulates(operator: Any) -> bool:
    """Whether an operator is autograd's own addition of two gradients of one tensor, between two nodes of its graph."""
    return operator is torch.ops.aten.add.Tensor and _graph_task() != -1 and _running_node() is None


def operator_named(name: str) -> Any:
    """An operator of aten by its name; None where this torch has none."""
    return getattr(getattr(torch.ops.aten, name, None), "default", None)


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
