"""Checks what can be profiled: everything else is refused by name, before anything is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat, ranks
from ..base.blocks import checkpointing_switch
from ..base.errors import Unsupported, warn
from ..rerun_state.sharded import refuse_tensor_parallel
from . import discovery, isolated_block
from .sample import Sample


def check_gradients(sample: Sample) -> None:
    """Raises ValueError where no backward can run."""
    if not torch.is_grad_enabled():
        region = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(
            f"a training step is measured, but gradients are switched off here: leave torch.{region}() first"
        )
    if not any(t.requires_grad for t in [*sample.model.parameters(), *sample.static_tensors()]):
        raise ValueError(
            f"there is nothing to train: no parameter of this {type(sample.model).__name__} and none of its arguments "
            "has requires_grad"
        )


def check_named(model: nn.Module, **named: Any) -> None:
    """Raise ValueError if the user names something that is not in the model; () names nothing, "auto" is no name."""
    for option, wanted in named.items():
        is_none = isinstance(wanted, (tuple, list)) and not wanted
        if not is_none and not (option == "blocks" and isinstance(wanted, str) and wanted == "auto"):
            is_one = isinstance(wanted, (str, nn.Module)) or not isinstance(wanted, Iterable)
            for each in [wanted] if is_one else wanted:
                _check_names_part(
                    model, each, discovery.named_by_user(model, each if is_one else [each], option), option
                )


def _check_names_part(model: nn.Module, wanted: Any, modules: Sequence[nn.Module], option: str) -> None:
    """Raise ValueError if a name of the user's selects no module, or a module that is not in the model."""
    own, kind = set(map(id, model.modules())), type(model).__name__
    if not modules:
        raise ValueError(f"{option}={wanted!r} names no module of this {kind}")
    stranger = next((module for module in modules if id(module) not in own), None)
    if stranger is not None:
        raise ValueError(
            f"{option}= has a {type(stranger).__name__} that is no part of this {kind}: is it one of another model, or "
            "of a copy?"
        )


def device_of(sample: Sample) -> torch.device:
    """The one device of a model and its sample.

    Tensors of the sample may also be on the host, such as lengths of packed sequences.
    """
    cpu, placed = torch.device("cpu"), [*sample.model.parameters(), *sample.model.buffers()]
    devices = {t.device for t in (*placed, *sample.static_tensors()) if t.device != cpu}
    devices |= {t.device for t in placed if t.dim() > 0}
    if len(devices) > 1:
        raise Unsupported(
            f"the model and its sample lie on several devices ({', '.join(map(str, devices))}); "
            "plan each device's part by itself"
        )
    device = devices.pop() if devices else cpu
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"memory on {device.type!r} cannot be measured; profile on the CPU or on CUDA")
    return device


def refuse_distributed(model: nn.Module, verb: str = "profile") -> None:
    """Refuse wrappers and shards whose backwards are not those of one process. verb: what is to be done instead."""
    name = type(model).__name__
    if name in ("DataParallel", "DistributedDataParallel"):
        raise Unsupported(f"{verb} the module inside {name}, before it is wrapped")
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
        raise Unsupported(
            "FullyShardedDataParallel gives blocks other parameters whenever they run: use fully_shard (FSDP2) instead"
        )
    refuse_tensor_parallel(model)
    _refuse_static_graph(model)


def check_model(model: nn.Module) -> None:
    """Refuse wrappers, and models that recompute by themselves."""
    refuse_distributed(model)
    name = type(model).__name__
    compiled = _compat.compiled_inside(model) is not None or _compat.is_compiled_in_place(model)
    if compiled or _compat.is_compiled_function(model.forward):
        raise Unsupported(
            f"this {name} is compiled as a whole, and a plan works between its blocks: plan the model itself, with "
            "torch.compile(block) in the place of each block, or give the model itself to cairn.torch.compile"
        )
    for part_name, part in model.named_modules():
        if _compat.is_compiled_in_place(part):
            raise Unsupported(
                f"{part_name} was compiled in place (Module.compile), around what a plan has to do; put "
                "torch.compile(module) in its place instead"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Unsupported(
                f"{part_name or 'the model'} is a module of torch.jit, whose forward cannot be taken over; put the "
                "module that it was made from in its place, or torch.compile(module)"
            )
    switch = next(filter(None, map(checkpointing_switch, model.modules())), "") if model.training else ""
    if switch:
        raise Unsupported(
            "gradient checkpointing is enabled in the model, which recomputes every layer by itself; switch it off "
            f"({switch}), and the budget decides which layers are recomputed"
        )
    if not model.training:
        warn("the model is in evaluation mode; its training step may take more: call model.train() first")


def _refuse_static_graph(model: nn.Module) -> None:
    """Raises Unsupported where DistributedDataParallel counts the backwards of a model: it would count a profile's."""
    if not ranks.is_distributed():
        return
    kind = torch.nn.parallel.DistributedDataParallel
    for wrapper in [value for value in gc.get_objects() if type(value) is kind]:
        if wrapper.static_graph and any(part is model for part in wrapper.module.modules()):
            raise Unsupported(
                "the model is in a DistributedDataParallel with static_graph=True, which takes a profile's backwards "
                "for its first ones, and ranks would drift apart: plan before it is wrapped, or leave static_graph out"
            )


def check_differentiable(sample: Sample) -> None:
    """Runs a forward; raises ValueError if no backward can follow it."""
    output, loss = sample.forward()
    if not isolated_block.differentiable(output if loss is None else loss):
        raise ValueError(
            "the model's output does not require gradients, so there is no backward: is there a detach() or no_grad() "
            "in its forward, or a torch.utils.checkpoint with use_reentrant=True? That one gives parameters no "
            "gradients where none of its inputs requires them; use_reentrant=False does"
        )
