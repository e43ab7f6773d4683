"""What is measured of one stage of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SLACK_BYTES = 12 * 1024  # what is smaller is bookkeeping: anchors, scalars, two random states of a checkpoint
KEEP = "k"  # what is done with a saved tensor that stays
PARAMETERS, BUFFERS, OPTIMIZER_STATE = "parameters", "buffers", "optimizer state"  # among what is resident
WORKSPACES = "workspaces of libraries"
REPLAYED = "random states and buffers to replay"
LEFT_BESIDE = "left by blocks beside their results"
IN_ATTRIBUTES = "tensors in attributes of modules"  # that nobody registered; the same, from before the step
STATE = (PARAMETERS, BUFFERS, OPTIMIZER_STATE, IN_ATTRIBUTES, WORKSPACES)  # what no schedule can do anything about
CHANGES_INPUT = "changes its input in place"
HIDDEN_BEHIND = "returns what another block keeps outside what autograd saves"
HIDES_INPUT = "keeps its input or output outside what autograd saves"
READS_HISTORY = "saves other tensors when it is run again, because it reads what its last run left in an attribute"
TAKES_OUT = "takes a value with gradients, which it is not passed, out of where it finds it"
GRADIENTS_INSIDE = "takes gradients in its own forward"
OVERWRITTEN = "reads a tensor that is changed in place, or replaced in its modules, after it ran"


@dataclasses.dataclass
class OptionMeasure:
    """What was measured of a block that keeps a part of what it saves; `rebuilds` says what it runs again."""

    decisions: str  # a letter for each saved tensor: keep, drop, keep as a mask
    saved_bytes: int
    forward_rise_bytes: int
    backward_rise_bytes: int
    accumulated_backward_rise_bytes: int
    forward_ns: int
    backward_ns: int
    rebuilds: str
    travel_bytes: int = 0  # what of the saved bytes can be sent to slower memory; 0 if not all can

    @property
    def time_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclasses.dataclass
class StageMeasure:
    """What was measured of one stage. A rise is the peak of an operation above the level at which it began.

    All sizes in bytes, all times in nanoseconds. `accumulated_*` are for a step whose gradients exist already.
    """

    name: str
    kind: str  # "block" or "outside"
    class_name: str = ""
    call: int = 0  # the number of this call of the block, from 0
    input_bytes: int = 0
    output_bytes: int = 0
    grad_bytes: int = 0
    saved_bytes: int = 0
    saved_count: int = 0
    travel_bytes: int = 0  # what of it can be sent to slower memory; 0 if not all can
    output_travels: bool = False  # the output by itself can
    also_held_bytes: int = 0  # of what it saves of its output, what is held outside of blocks, too, by what runs next
    pinned_bytes: int = 0  # of its output, what is resident to the end of the step
    pinned_saved_bytes: int = 0  # of that, what it saves itself
    added_bytes: int = 0  # left beside its output and saved, resident; runs again put their own beside it
    leftover_bytes: int = 0  # saved for something left beside its output that no loss uses, resident
    untracked_bytes: int = 0  # what little stays beside its output when it saves nothing, in checkpoints inside
    passing_bytes: int = 0  # of its output, what goes before the backward, unless the next stage runs again from it
    left_bytes: int = 0  # of its output, what is counted with what runs behind it, outside of blocks, or nowhere
    left_saved_bytes: int = 0  # of that, what it saves itself
    output_is_held: bool = False  # by what runs behind it, outside of blocks; it is not among the bytes that travel
    forward_rise_bytes: int = 0
    forward_only_rise_bytes: int = 0
    backward_rise_bytes: int = 0
    accumulated_backward_rise_bytes: int = 0
    #: What runs outside of blocks, and is no stage: before it in the forward, and before its own backward.
    between_forward_rise_bytes: int = 0
    between_backward_rise_bytes: int = 0
    accumulated_between_backward_rise_bytes: int = 0
    weight_grad_bytes: int = 0
    accumulated_weight_grad_bytes: int = 0
    made_copies: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of autocast's copies of parameters
    saved_copies: list[str] = dataclasses.field(default_factory=list)  # for each saved tensor whose copy it is, or ""
    waiting_bytes: int = 0  # gradients that arrive beside that of its output: they wait for others
    accumulated_waiting_bytes: int = 0
    listed: dict[str, int] = dataclasses.field(default_factory=dict)  # outputs of stages, there when it first runs
    listed_slack_bytes: int = 0  # so much of that takes no more, for it goes before its forward's peak
    held_bytes: int = 0  # kept by the caller until the step ends
    forward_ns: int = 0
    forward_only_ns: int = 0
    backward_ns: int = 0
    again_ns: int = 0  # what running it again costs beside the run
    random: bool = False
    random_state_is_new: bool = True  # random numbers were drawn since the block before began
    writes_buffers: list[str] = dataclasses.field(default_factory=list)
    keep_reason: str = ""  # why it must not be recomputed; empty: it may
    captured: list[str] = dataclasses.field(default_factory=list)  # where it reads values with a history, not passed
    brings_back: bool = False  # attributes and hooks that are changed after it ran are brought back to recompute it
    closed: str = ""  # why it has no options beside keeping everything; empty: it has, or was not looked at
    digest: str = ""  # of its operations, where it has options
    asked: list[int] = dataclasses.field(default_factory=list)  # order in which a backward asks for saved tensors
    draws: list[int] = dataclasses.field(default_factory=list)  # random operations come after so many saved tensors
    options: list[OptionMeasure] = dataclasses.field(default_factory=list)  # the first keeps everything

    @property
    def resident_saved_bytes(self) -> int:
        """Of what it saves, what is resident anyway, unless another run saves it."""
        return self.pinned_saved_bytes + self.added_bytes

    @property
    def may_be_opened(self) -> bool:
        """Whether a part of what it saves may be rebuilt."""
        return self.keep_reason in ("", GRADIENTS_INSIDE)

    def arriving_bytes(self, created: bool) -> int:
        """Of all gradients on their way back when its backward begins."""
        return self.grad_bytes + (self.waiting_bytes if created else self.accumulated_waiting_bytes)

    def saved_travels(self, number: int = 0) -> bool:
        """Whether all that an option saves is what transfers move, and is gone from the device when it was dropped."""
        measured = self.options[number] if number else self
        saved = measured.saved_bytes - (self.output_bytes if self.output_is_held else 0)
        return 0 < measured.travel_bytes <= saved <= measured.travel_bytes + SLACK_BYTES

    def copies_held(self, number: int = 0) -> set[str]:
        """The parameters of which an option saves autocast's copies."""
        decisions = self.options[number].decisions if number else KEEP * len(self.saved_copies)
        found = zip(self.saved_copies, decisions, strict=True) if self.saved_copies else ()
        return {name for name, decision in found if name and decision == KEEP}

    def opened(self) -> list[tuple[int, OptionMeasure]]:
        """The options beside keeping everything, with their numbers."""
        return list(enumerate(self.options[1:], 1)) if self.may_be_opened else []

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageMeasure:
        """Reads what `dataclasses.asdict` wrote."""
        return cls(**{**data, "options": [OptionMeasure(**option) for option in data.get("options", ())]})

    def signature(self) -> tuple[Any, ...]:
        """Equal for blocks that need not be timed apart: that differ in nothing but who keeps their output."""
        not_saved = self.left_bytes - self.left_saved_bytes
        sizes = (
            self.input_bytes,
            self.output_bytes + self.left_bytes,
            self.saved_bytes + not_saved,
            self.saved_count,
            self.forward_rise_bytes,
            self.forward_only_rise_bytes,
            self.backward_rise_bytes - not_saved,
            self.weight_grad_bytes,
        )
        return (self.kind, self.class_name, sizes, self.random, tuple(self.writes_buffers), bool(self.keep_reason))
