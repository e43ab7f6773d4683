"""Profiles whose measured times are replaced by random ones."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct

SEEDS = int(os.environ.get("CAIRN_SEEDS", "1"))
UNLIMITED = 2**40


def with_random_times(profile: ct.Profile, seed: int) -> ct.Profile:
    """The profile as if everything had taken up to ten times as long, or as short."""
    choose = random.Random(seed)

    def drawn(thing: Any) -> Any:
        times = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.name.endswith("_ns")}
        return dataclasses.replace(thing, **{k: int(v * 10 ** choose.uniform(-1, 1)) for k, v in times.items()})

    stages = [dataclasses.replace(drawn(s), options=[drawn(o) for o in s.options]) for s in profile.stages]
    return dataclasses.replace(profile, stages=tuple(stages))
