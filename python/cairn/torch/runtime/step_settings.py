"""Settings that the steps of an executor share, and the record of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..rerun_state.module_state import BlockState
from ..schedule.program import (
    Program,
)
from ..selective.block_runs import SelectiveBlock


@dataclass(frozen=True)
class Settings:
    """Settings of all steps of an executor."""

    program: Program
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    devices: tuple[torch.device, ...] = ()  # those with a generator of their own
    device_types: tuple[str, ...] = ("cpu",)
    resident: Callable[[], frozenset[int]] = frozenset  # storages that are never offloaded: parameters and buffers


@dataclass
class PlannedBlock:
    """A planned block as a step sees it."""

    name: str
    state: BlockState
    selective: SelectiveBlock | None = None
    is_kept: bool = False  # it must not be recomputed


@dataclass
class Trace:
    """The record of a step: runs of blocks as (operation, stage) in order, and deviations from the plan."""

    runs: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
