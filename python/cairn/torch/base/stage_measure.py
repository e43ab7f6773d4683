"""The measurement of one stage of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SLACK_BYTES = 12 * 1024  # less is bookkeeping: anchors, scalars, two random states of a checkpoint
KEEP = "k"  # the letter for a saved tensor that is kept
PARAMETERS, BUFFERS, OPTIMIZER_STATE = "parameters", "buffers", "optimizer state"  # names of resident memory
WORKSPACES = "workspaces of libraries"
REPLAYED = "random states and buffers to replay"
SIDE_OUTPUTS = "side outputs of blocks"
IN_ATTRIBUTES = "tensors in attributes of modules"  # neither parameters nor buffers; from before the step
STATE = (PARAMETERS, BUFFERS, OPTIMIZER_STATE, IN_ATTRIBUTES, WORKSPACES)  # memory that no schedule can reduce
CHANGES_INPUT = "changes its input in place"
RETURNS_UNTRACKED = "returns what another block keeps outside what autograd saves"
HOLDS_UNTRACKED = "keeps its input or output outside what autograd saves"
READS_HISTORY = "saves other tensors when it is recomputed, because it reads what its last run left in an attribute"
TAKES_OUT = "takes a value with gradients, which it is not passed, out of where it finds it"
OWN_HOOKS = "keeps what it saves in saved-tensor hooks of its own"
GRADIENTS_INSIDE = "takes gradients in its own forward"
RUNS_ONCE = "is run once: its own backward recomputes what it needs"
OVERWRITTEN = "reads a tensor that is changed in place, or replaced in its modules, after it ran"


@dataclasses.dataclass
class OptionMeasure:
    """Measurements of a block under an option of selective recomputation; `recomputes` names operators."""

    decisions: str  # a letter for each saved tensor: keep, drop, keep as a mask
    saved_bytes: int
    forward_rise_bytes: int
    backward_rise_bytes: int
    accumulated_backward_rise_bytes: int
    forward_ns: int
    backward_ns: int
    recomputes: str
    offloadable_bytes: int = 0  # saved bytes that can be offloaded; 0 if some cannot

    @property
    def time_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclasses.dataclass
class StageMeasure:
    """Measurements of one stage. A rise is the peak of an operation above the level at which it began.

    All sizes are in bytes, all times in nanoseconds. `accumulated_*` are for a step whose gradients exist already.
    *Pinned* means resident to the end of the step. A *side output* is a tensor that a block leaves elsewhere than in
    its result, such as a loss in an attribute.
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
    offloadable_bytes: int = 0  # saved bytes that can be offloaded; 0 if some cannot
    output_is_offloadable: bool = False  # the output alone can be offloaded
    also_held_bytes: int = 0  # outputs that it saves, and that the code behind it, outside blocks, holds as well
    pinned_bytes: int = 0  # outputs that are resident to the end of the step
    pinned_saved_bytes: int = 0  # of these, the ones that it saves itself
    added_bytes: int = 0  # side outputs that it saves, resident; a recomputation adds its own to them
    leftover_bytes: int = 0  # saved for side outputs that no loss uses, resident
    untracked_bytes: int = 0  # small tensors that stay when it saves nothing, of checkpoints inside it
    passing_bytes: int = 0  # outputs that are freed before the backward, unless the next stage is recomputed from them
    left_bytes: int = 0  # outputs that count with the code behind it, outside blocks, or nowhere
    left_saved_bytes: int = 0  # of these, the ones that it saves itself
    #: By the code behind it, outside blocks; then `offloadable_bytes` does not count the output.
    output_is_held: bool = False
    forward_rise_bytes: int = 0
    forward_only_rise_bytes: int = 0
    backward_rise_bytes: int = 0
    accumulated_backward_rise_bytes: int = 0
    #: Peaks of the code outside blocks that is no stage: before it in the forward, and before its own backward.
    between_forward_rise_bytes: int = 0
    between_backward_rise_bytes: int = 0
    accumulated_between_backward_rise_bytes: int = 0
    weight_grad_bytes: int = 0
    accumulated_weight_grad_bytes: int = 0
    made_copies: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of autocast's copies of parameters
    saved_copies: list[str] = dataclasses.field(default_factory=list)  # for each saved tensor: whose copy it is, or ""
    pending_grad_bytes: int = 0  # other gradients that exist when its backward begins: they wait for others
    accumulated_pending_grad_bytes: int = 0
    listed: dict[str, int] = dataclasses.field(default_factory=dict)  # outputs of others, alive when it first runs
    listed_slack_bytes: int = 0  # bytes of these that are freed before its forward's peak
    held_bytes: int = 0  # kept by the caller until the step ends
    forward_ns: int = 0
    forward_only_ns: int = 0
    backward_ns: int = 0
    recompute_overhead_ns: int = 0  # overhead of a recomputation, besides its forward
    random: bool = False
    random_state_is_new: bool = True  # random numbers were drawn since the block before began
    writes_buffers: list[str] = dataclasses.field(default_factory=list)
    keep_reason: str = ""  # why it must not be recomputed; empty: it may
    captured: list[str] = dataclasses.field(default_factory=list)  # captured variables with a `grad_fn`: their places
    restores_attributes: bool = False  # a recomputation restores attributes and hooks that were changed after it ran
    closed: str = ""  # why it has no options besides keeping everything; empty: it has, or was not examined
    digest: str = ""  # of its recorded operations, if it has options
    asked: list[int] = dataclasses.field(default_factory=list)  # order in which a backward reads its saved tensors
    draws: list[int] = dataclasses.field(default_factory=list)  # for each random operation: saved tensors before it
    options: list[OptionMeasure] = dataclasses.field(default_factory=list)  # the first keeps everything

    @property
    def resident_saved_bytes(self) -> int:
        """Saved bytes that are resident anyway, unless a recomputation saves them."""
        return self.pinned_saved_bytes + self.added_bytes

    @property
    def may_be_selective(self) -> bool:
        """Whether selective recomputation is possible."""
        return self.keep_reason in ("", GRADIENTS_INSIDE, RUNS_ONCE)

    def keep(self, reason: str) -> None:
        """The block must not be recomputed. The first reason stays."""
        self.keep_reason = self.keep_reason or reason

    def arriving_bytes(self, created: bool) -> int:
        """Bytes of all gradients that exist when its backward begins."""
        return self.grad_bytes + (self.pending_grad_bytes if created else self.accumulated_pending_grad_bytes)

    def saved_is_offloadable(self, number: int = 0) -> bool:
        """Whether all saved tensors of an option can be offloaded, so that dropping them frees the device memory."""
        measured = self.options[number] if number else self
        saved = measured.saved_bytes - (self.output_bytes if self.output_is_held else 0)
        return 0 < measured.offloadable_bytes <= saved <= measured.offloadable_bytes + SLACK_BYTES

    def copies_held(self, number: int = 0) -> set[str]:
        """The parameters of which an option saves autocast's copies."""
        decisions = self.options[number].decisions if number else KEEP * len(self.saved_copies)
        pairs = zip(self.saved_copies, decisions, strict=True) if self.saved_copies else ()
        return {name for name, decision in pairs if name and decision == KEEP}

    def selective_options(self) -> list[tuple[int, OptionMeasure]]:
        """The options besides keeping everything, with their numbers."""
        return list(enumerate(self.options[1:], 1)) if self.may_be_selective else []

    def by_option(self, number: int) -> StageMeasure:
        """The stage if it always ran by this option, and had no others."""
        found: dict[str, Any] = {"options": [], "digest": "", "closed": ""}
        if number:
            option = dataclasses.asdict(self.options[number])
            own = {field.name for field in dataclasses.fields(self)}
            found |= {name: value for name, value in option.items() if name in own}
        return dataclasses.replace(self, **found)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageMeasure:
        """Read the output of `dataclasses.asdict`."""
        return cls(**{**data, "options": [OptionMeasure(**option) for option in data.get("options", ())]})

    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for blocks which need not be timed separately: only who keeps their output differs."""
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
