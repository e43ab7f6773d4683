"""Sharded parameters: those of FSDP2 (`fully_shard`) are gathered for a recomputation, those of tensor-parallel modules
are refused.

FSDP2 gathers a module's parameters when the module is called, and again when its backward begins. A recomputation runs
before that and calls the block's forward alone, so it gathers them itself. They stay gathered after a recomputation
that saves tensors, because the block's backward comes next; otherwise they are sharded again.

So the unit of sharding must be the block. A smaller unit inside a block would reshard when its own backward ends, while
the block's goes on. A larger unit gathers its parameters when its own backward begins, but the recomputation of its
last block must be over by then. In that case the larger unit becomes the block.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from ..base import memory, ranks
from ..base.blocks import Block
from ..base.errors import Unsupported
from ..base.ranks import Ranks


def _kind() -> Any:
    """FSDP2's class of sharded modules; None if this torch has none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def shard_bytes(model: nn.Module) -> dict[tuple[nn.Module, str], int]:
    """By module and name, the bytes that this rank has of each parameter that is sharded now."""
    return {
        (module, name): memory.storage_bytes(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if memory.is_distributed(parameter)
    }


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward has left gathered, so that a step begins as usual."""
    kind = _kind()
    for module in model.modules() if kind is not None else ():
        if isinstance(module, kind):
            module.reshard()


def is_any(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is sharded by itself, so that its whole parameters come and go."""
    kind = _kind()
    if kind is None or not kind.__subclasses__():  # each sharded module gets a class of its own
        return False
    return any(isinstance(module, kind) for module in modules)


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks over which FSDP2 shards a model."""
    if not (ranks.several() and is_any(model.modules())):
        return Ranks()
    parts = list(filter(memory.is_distributed, model.parameters()))
    if not parts:  # all are gathered, as a forward without a backward may leave them
        reshard(model)
        parts = list(filter(memory.is_distributed, model.parameters()))
    meshes: list[Any] = [part.device_mesh for part in parts]  # type: ignore[attr-defined]
    groups = dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups())
    return Ranks(tuple(group for group in groups if distributed.get_world_size(group) > 1))


def refuse_sharded_modules(blocks: Iterable[Block]) -> None:
    """Raises Unsupported for blocks of which a part is sharded by itself."""
    kind = _kind()
    for block in blocks if kind is not None else ():
        inner = [part for part in block.all_modules() if part not in block.modules and isinstance(part, kind)]
        if inner:
            raise Unsupported(
                f"a {type(inner[0]).__name__} inside of block '{block.name}' is sharded by itself: call fully_shard on "
                "whole blocks, and on the model, or name what is sharded with blocks="
            )


def gather(modules: Sequence[nn.Module], surroundings: contextlib.ExitStack, stays: bool) -> None:
    """Gather the parameters of modules that are sharded by themselves, until `surroundings` close.

    They stay gathered after that if they are to stay.
    """
    kind = _kind()
    if kind is None:
        return
    for module in modules:
        if isinstance(module, kind):
            module.unshard()
            if not stays:
                surroundings.callback(module.reshard)


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise Unsupported for parameters that stay sharded while the model runs; FSDP2's are gathered then."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    kind, fully_sharded = _kind(), set[int]()
    if kind is not None:
        fully_sharded = {
            id(part) for module in model.modules() if isinstance(module, kind) for part in module.modules()
        }
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if memory.is_distributed(parameter) and not (id(module) in fully_sharded and _is_data_parallel(parameter)):
                placements = ", ".join(map(str, _placements(parameter)))
                raise Unsupported(
                    f"{name} is a DTensor ({placements}) that stays in parts while the {type(module).__name__} runs, "
                    "as tensor parallelism (parallelize_module) has it. Ranks that profile and recompute it each "
                    "would wait for each other without end: leave tensor-parallel models without a plan"
                )


def _placements(parameter: torch.Tensor) -> Sequence[Any]:
    placements: Sequence[Any] = getattr(parameter, "placements", ())
    return placements


def _is_data_parallel(parameter: torch.Tensor) -> bool:
    """Whether a fully sharded parameter has the placements of FSDP2 alone: one shard, perhaps of a replica."""
    *others, last = _placements(parameter)
    return last.is_shard() and len(others) <= 1 and all(placement.is_replicate() for placement in others)


def whole_units(model: nn.Module, modules: Iterable[nn.Module], named: bool) -> list[nn.Module]:
    """The modules that can be blocks: each module, or the unit of sharding that contains it. Call it after a forward.

    Modules of one unit that was sharded as a list are left out: recomputing one would reshard the parameters that the
    backward of another needs. Raises Unsupported if the user has `named` such modules or modules inside a unit, if no
    module is left, or if the unit is the whole model.
    """
    if not is_any(model.modules()):
        return list(modules)
    units, shared = dict(_units(model)), _sharded_together(model)
    blocks: list[nn.Module] = []
    refused = ""
    for module in modules:
        name, unit = units.get(id(module), ("", module))
        part = _name_of(model, module)
        if id(unit) in shared:
            together = ", ".join(f"'{each}'" for each in shared[id(unit)])
            refused = f"fully_shard shards {together} as one, of which '{part}' is to be a block: shard each by itself"
        elif unit is not module and any(map(memory.is_distributed, module.parameters())):  # they are gone already
            if unit is model:
                refused = (
                    f"fully_shard has taken the parameters of '{part}' away after the forward, with those of the whole "
                    f"{type(model).__name__}: call fully_shard on each block, and then on the model"
                )
            elif named:
                refused = (
                    f"blocks= names '{part}', whose parameters fully_shard takes away together with all of '{name}': "
                    f"name '{name}', or call fully_shard on '{part}' itself"
                )
            else:
                blocks.append(unit)
        else:
            blocks.append(module)
    if refused and (named or not blocks):
        raise Unsupported(refused)
    return list(dict.fromkeys(blocks))


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "")


def _units(model: nn.Module) -> Iterator[tuple[int, tuple[str, nn.Module]]]:
    """By identity of each module in a unit of sharding: the name of the innermost unit, and the unit."""
    kind = _kind()
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield from ((id(part), (name, module)) for part in module.modules())


def _sharded_together(model: nn.Module) -> dict[int, list[str]]:
    """By identity of each module that was sharded in a list with others: all names of that list."""
    kind = _kind()
    state_of = getattr(getattr(sys.modules.get("torch.distributed.fsdp"), "fully_shard", None), "state", id)
    groups: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, kind):
            groups.setdefault(id(state_of(module)), []).append((name, module))
    several = [group for group in groups.values() if len(group) > 1]
    return {id(module): [name for name, _ in group] for group in several for _, module in group}
