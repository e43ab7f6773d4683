"""What is measured of one stage of a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

SLACK_BYTES = 4096  # what is smaller is bookkeeping: anchors, scalars, random states
CHANGES_INPUT = "changes its input in place"


@dataclasses.dataclass
class StageMeasure:
    """What was measured of one stage. A rise is the peak of an operation above the level at which it began.

    All sizes in bytes, all times in nanoseconds. `accumulated_*` are for a step whose gradients exist already.
    """

    name: str
    kind: str  # "block" or "outside"
    class_name: str = ""
    call: int = 0  # the how many-th call of this block
    input_bytes: int = 0
    output_bytes: int = 0
    grad_bytes: int = 0
    saved_bytes: int = 0
    saved_count: int = 0
    forward_rise_bytes: int = 0
    forward_only_rise_bytes: int = 0
    backward_rise_bytes: int = 0
    accumulated_backward_rise_bytes: int = 0
    weight_grad_bytes: int = 0
    accumulated_weight_grad_bytes: int = 0
    cast_bytes: int = 0  # autocast's copies of parameters, which live until the forward ends
    held_bytes: int = 0  # kept by the caller until the step ends
    forward_ns: int = 0
    forward_only_ns: int = 0
    backward_ns: int = 0
    random: bool = False
    writes_buffers: list[str] = dataclasses.field(default_factory=list)
    keep_reason: str = ""  # why it must not be recomputed; empty: it may

    def signature(self) -> tuple[Any, ...]:
        """Equal for blocks that need not be timed apart."""
        sizes = (
            self.input_bytes,
            self.output_bytes,
            self.saved_bytes,
            self.saved_count,
            self.forward_rise_bytes,
            self.forward_only_rise_bytes,
            self.backward_rise_bytes,
            self.weight_grad_bytes,
        )
        return (self.kind, self.class_name, sizes, self.random, tuple(self.writes_buffers), bool(self.keep_reason))
