"""What a stage of a plan's chain is in the model: the one vocabulary that profiler, planner and executor share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = "block"
OUTSIDE = "outside"


@dataclass(frozen=True)
class StageRef:
    """One stage of a plan's chain; stages are in the order of the forward pass, numbered from 1 as in the chain.

    ``kind``  ``"block"``: one call of a module, which the executor may recompute;
              ``"outside"``: what the model itself runs before, between or after blocks. It is always kept
              (``no_recompute`` in the chain), and the executor never touches it.
    ``name``  the qualified name of the block's module, or a description such as ``"before transformer.h.0"``.
    ``call``  which call of that module within one forward pass (0 is the first).
    """

    kind: str
    name: str
    call: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (BLOCK, OUTSIDE):
            raise ValueError(f"a stage is a 'block' or 'outside', not {self.kind!r}")
        if self.call < 0:
            raise ValueError(f"stage {self.name!r}: call {self.call} is negative")

    @property
    def is_block(self) -> bool:
        return self.kind == BLOCK

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "call": self.call}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageRef:
        return cls(kind=data["kind"], name=data["name"], call=data.get("call", 0))

    def __str__(self) -> str:
        return self.name if self.call == 0 else f"{self.name} (call {self.call})"
