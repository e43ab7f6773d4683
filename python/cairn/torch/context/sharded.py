"""Parameters that FSDP2 (`fully_shard`) has taken apart, while a block runs again.

A module gets its whole parameters when it is called, and again when its backward begins. A later run comes before that
and calls the block's forward alone, so it asks for them itself. After a run that saves they stay, for the block's
backward is what comes next; else they are taken apart again.

So blocks must be sharded as they are, or with others; not in parts, whose own backwards would end while others go on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..base.blocks import Block
from ..base.errors import Unsupported


def _kind() -> Any:
    """The class that sharded modules get; None where there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_any(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is sharded by itself, so that its whole parameters come and go."""
    kind = _kind()
    if kind is None or not kind.__subclasses__():  # each sharded module gets a class of its own
        return False
    return any(isinstance(module, kind) for module in modules)


def refuse_sharded_parts(blocks: Iterable[Block]) -> None:
    """Raises Unsupported for blocks of which a part is sharded by itself."""
    kind = _kind()
    for block in blocks if kind is not None else ():
        inner = [part for part in block.parts() if part not in block.modules and isinstance(part, kind)]
        if inner:
            raise Unsupported(
                f"a {type(inner[0]).__name__} inside of block '{block.name}' is sharded by itself: call fully_shard on "
                "whole blocks, and on the model, or name what is sharded with blocks="
            )


def gather(modules: Sequence[nn.Module], surroundings: contextlib.ExitStack, stays: bool) -> None:
    """Whole parameters for those of the modules that are sharded by themselves, for as long as `surroundings` are open,
    or longer if they are to stay.
    """
    kind = _kind()
    if kind is None:
        return
    for module in modules:
        if isinstance(module, kind):
            module.unshard()
            if not stays:
                surroundings.callback(module.reshard)
