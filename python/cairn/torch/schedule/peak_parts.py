"""The tensors in memory at the peak of a schedule, in named groups.

The operations are replayed one after the other. This explains the peak that the simulator of the C library has
computed. It does not check the schedule.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Op = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One share of the memory at a moment."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class PeakMoment:
    """One operation of a schedule and the most memory while it runs, in bytes."""

    op: int
    text: str
    stage: int  # numbered from 1
    bytes: int
    parts: tuple[Part, ...]  # what was there before it, and what it takes itself


class Replay:
    """The values on the device and on the host along a list of operations, with the sizes of the chain."""

    def __init__(self, chain: Mapping[str, Any]) -> None:
        self.chain = chain
        self.stages = chain["stages"]
        self.outputs: set[int] = set()
        self.saved: dict[int, int] = {}  # option by stage
        self.host: dict[tuple[str, int], int] = {}  # option by value
        self.gradient = len(self.stages)
        self.done: list[int] = []  # stages whose backward ran

    def copied(self) -> Replay:
        """Another one, in the same state."""
        copied = copy.copy(self)
        copied.outputs, copied.saved, copied.host = set(self.outputs), dict(self.saved), dict(self.host)
        copied.done = list(self.done)
        return copied

    def output_bytes(self, stage: int) -> int:
        return int(self.stages[stage - 1]["output_bytes"]) if stage else int(self.chain["input_bytes"])

    def gradient_bytes(self, stage: int) -> int:
        return int(self.stages[stage - 1]["grad_bytes"]) if stage else int(self.chain["input_grad_bytes"])

    def option(self, stage: int, option: int) -> Mapping[str, Any]:
        option_values: Mapping[str, Any] = self.stages[stage - 1]["options"][option]
        return option_values

    def level(self) -> int:
        total = int(self.chain["fixed_bytes"]) + self.output_bytes(0) + self.gradient_bytes(self.gradient)
        total += sum(self.output_bytes(stage) for stage in self.outputs)
        total += sum(int(self.option(stage, option)["saved_bytes"]) for stage, option in self.saved.items())
        return total + sum(int(self.stages[stage - 1]["weight_grad_bytes"]) for stage in self.done)

    def value_bytes(self, kind: str, stage: int, option: int = 0) -> int:
        """Size of a[l] or A[l]."""
        return self.output_bytes(stage) if kind == "output" else int(self.option(stage, option)["saved_bytes"])

    def _move(self, name: str, kind: str, stage: int) -> int:
        """A drop or a transfer; returns what it adds on the device."""
        if name == "drop":
            (self.outputs.discard if kind == "output" else self.saved.pop)(stage)
        elif name == "offload":
            self.host[kind, stage] = self.saved[stage] if kind == "saved" else 0
        elif name == "discard":
            del self.host[kind, stage]
        elif kind == "output":
            self.outputs.add(stage)
            return self.output_bytes(stage)
        else:
            self.saved[stage] = self.host[kind, stage]
            return self.value_bytes(kind, stage, self.saved[stage])
        return 0

    def run(self, op: Op) -> tuple[int, int]:
        """Performs an operation; returns what it adds as a result, and its workspace."""
        name, *rest = op
        if name in ("drop", "offload", "prefetch", "discard"):
            return self._move(name, *rest), 0
        stage = rest[0]
        described = self.stages[stage - 1]
        if name == "forward_save":
            chosen = rest[1] if len(rest) > 1 else 0
            self.saved[stage] = chosen
            option = self.option(stage, chosen)
            return int(option["saved_bytes"]), int(option["forward_workspace_bytes"])
        if name == "backward":
            option = self.option(stage, self.saved.pop(stage))
            self.outputs.discard(stage - 1)
            self.gradient = stage - 1
            self.done.append(stage)
            result = self.gradient_bytes(stage - 1) + int(described["weight_grad_bytes"])
            return result, int(option["backward_workspace_bytes"])
        self.outputs.add(stage)
        if name == "forward_drop":
            self.outputs.discard(stage - 1)
        return self.output_bytes(stage), int(described["forward_only_workspace_bytes"])

    def most_during(self, op: Op) -> int:
        """Performs an operation; returns the most memory meanwhile."""
        before = self.level()
        result, workspace = self.run(op)
        return max(before, self.level(), before + result + workspace)

    def parts(self, held: Mapping[str, int]) -> list[Part]:
        """The values that are resident now, without fixed memory. Outputs `held` by the caller are parts, too."""
        name = {stage: str(self.stages[stage - 1]["name"]) for stage in range(1, len(self.stages) + 1)}
        saved = {stage: int(self.option(stage, option)["saved_bytes"]) for stage, option in self.saved.items()}
        left = {stage: int(self.stages[stage - 1]["weight_grad_bytes"]) for stage in self.done}
        kept = {stage: min(held.get(name[stage], 0), size) for stage, size in (saved | left).items()}
        parts = [Part("input", self.output_bytes(0))]
        parts += [Part(f"saved {_by(name[stage])}", saved[stage] - kept[stage]) for stage in sorted(saved)]
        parts += [
            Part(f"checkpoint: output of {name[stage]}", self.output_bytes(stage)) for stage in sorted(self.outputs)
        ]
        parts.append(Part("gradient on its way back", self.gradient_bytes(self.gradient)))
        parts += [Part(f"left by the backward {_of(name[stage])}", left[stage] - kept[stage]) for stage in self.done]
        parts.append(Part("held by the caller: the model's output and loss", sum(kept.values())))
        return [part for part in parts if part.bytes]


def _is_place(stage: str) -> bool:
    """Whether a stage is outside of blocks. Such a stage has a place for a name: "before blocks.0"."""
    return stage.startswith(("before ", "between ", "after "))


def _of(stage: str) -> str:
    return stage if _is_place(stage) else f"of {stage}"


def _by(stage: str) -> str:
    return stage if _is_place(stage) else f"by {stage}"


def first_over(chain: Mapping[str, Any], ops: Sequence[Op], budget: int) -> str:
    """The first operation that takes more than a budget, in words."""
    replay = Replay(chain)
    for op in ops:
        if replay.most_during(op) > budget:
            return _describe(chain, op)[0]
    return ""


def peak_moment(
    chain: Mapping[str, Any],
    ops: Sequence[Op],
    resident: Mapping[str, int] | None = None,
    held: Mapping[str, int] | None = None,
    at: tuple[int, int, int] | None = None,
) -> PeakMoment:
    """The first moment of the peak.

    `resident` names the chain's fixed bytes. `held` says which results of stages the caller keeps. `at` is the position
    of the peak, its bytes, and those that are being offloaded; needed for schedules with transfers.
    """
    index, peak, leaving = at or (*peak_of(chain, ops), 0)
    replay = Replay(chain)
    for op in ops[:index]:
        replay.run(op)
    parts = replay.parts(held or {})
    named = dict(resident or {})
    unnamed = int(chain["fixed_bytes"]) - sum(named.values())
    parts.append(Part("on its way to the host", leaving))
    parts = (
        [Part(name, size) for name, size in named.items()] + ([Part("resident", unnamed)] if unnamed else []) + parts
    )
    text, stage = _describe(chain, ops[index])
    own = peak - sum(part.bytes for part in parts)
    parts.append(Part(f"taken by the {text}", own))
    return PeakMoment(index, text, stage, peak, tuple(part for part in parts if part.bytes))


def peak_of(chain: Mapping[str, Any], ops: Sequence[Op]) -> tuple[int, int]:
    """The operation of the peak and its bytes, if transfers took no time."""
    replay = Replay(chain)
    best = (0, replay.level())
    for index, op in enumerate(ops):
        peak = replay.most_during(op)
        if peak > best[1]:
            best = (index, peak)
    return best


def _describe(chain: Mapping[str, Any], op: Op) -> tuple[str, int]:
    stage = int(op[-1] if op[0] in ("drop", "offload", "prefetch", "discard") else op[1])
    name = chain["stages"][stage - 1]["name"] if stage else "the input"
    words = {
        "forward_save": "forward",
        "forward_keep": "forward (not saving)",
        "forward_drop": "forward (not saving)",
        "backward": "backward",
    }
    return f"{words[op[0]]} {_of(name)}" if op[0] in words else f"{op[0]} {name}", stage


def grouped(parts: Sequence[Part], blocks: Sequence[str]) -> list[Part]:
    """Parts with those of blocks added up, the largest first."""
    totals: dict[str, int] = {}
    known = set(blocks)
    for part in parts:
        for prefix, group in _GROUPS.items():
            if part.name.startswith(prefix) and part.name[len(prefix) :] in known:
                totals[group] = totals.get(group, 0) + part.bytes
                break
        else:
            totals[part.name] = totals.get(part.name, 0) + part.bytes
    return sorted((Part(name, size) for name, size in totals.items()), key=lambda part: -part.bytes)


_GROUPS = {
    "saved by ": "saved by blocks",
    "checkpoint: output of ": "checkpoints: outputs of blocks",
    "left by the backward of ": "gradients left by the backwards of blocks",
}
