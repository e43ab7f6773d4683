"""The stages of a plan's chain in the model: the vocabulary that profiler, planner and executor share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = "block"
OUTSIDE = "outside"


def shown(name: str, call: int = 0) -> str:
    """The name of a stage in reports. A model that is one block has no name of its own."""
    name = name or "the model"
    return name if call == 0 else f"{name} (call {call})"


def sentences(reasons: Iterable[tuple[str, str]], what: str) -> list[str]:
    """One sentence for each reason, about all stages that it applies to: "a is always kept: it draws"."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        by_reason.setdefault(reason, []).append(shown(name))
    return [_sentence(list(dict.fromkeys(names)), what, reason) for reason, names in by_reason.items()]


def _sentence(names: list[str], what: str, reason: str) -> str:
    if len(names) == 1:
        return f"{names[0]} is {what}: it {reason}"
    return f"{listed(names)} are {what}: each {reason}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, two of more than three."""
    shortened = [*names[:2], f"{len(names) - 2} more"] if len(names) > 3 else list(names)
    return " and ".join(filter(None, (", ".join(shortened[:-1]), shortened[-1])))


@dataclass(frozen=True)
class StageRef:
    """One stage of a plan's chain; stages are in the order of the forward pass, numbered from 1 as in the chain.

    Attributes
    ----------
    kind : {"block", "outside"}
        "block": one call of a module, which may be recomputed. "outside": what the model itself runs before, between or
        after blocks. It is always kept (``no_recompute`` in the chain).
    name : str
        The qualified name of the block's module, or a description such as ``"before transformer.h.0"``.
    call : int
        Which call of that module within one forward pass; 0 is the first.
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
        return shown(self.name, self.call)
