"""The conditions under which a plan is valid, as words and numbers that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..rerun_state.backend_flags import named_values
from . import shapes


def autocast_of(device: torch.device) -> str:
    """The type that autocast casts to here; empty where it is off."""
    enabled = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if enabled else ""


def fingerprint_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions under which a plan is valid: versions, device, types and shapes."""
    described = [(name, str(p.dtype), list(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    tensor = next(iter(model.parameters()), torch.empty(0, device="cpu"))
    return {
        "torch": torch.__version__,
        "model": type(model).__name__,
        "parameters": hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16],
        "training": model.training,
        "device": torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else tensor.device.type,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "autocast": autocast_of(tensor.device),
        "backend_flags": named_values(),
        "inputs": shapes.described(args, kwargs),
        "input_names": shapes.names_of(model, args, kwargs),
    }
