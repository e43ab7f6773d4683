"""Weights that are computed at every use (`torch.nn.utils.parametrize`), and the cache that keeps them for a while.

Within `parametrize.cached()` a weight is computed by whoever uses it first. A run of a block that finds it there does
something else than one that does not, and the weight takes memory that no plan knows of. So a profile is taken outside
of it, and a block that does not repeat its first run for that reason says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

from ..base import _compat
from ..base.errors import RecomputationError, Unsupported


def refuse_cache() -> None:
    """Raises Unsupported where weights are cached."""
    if _compat.weights_are_cached():
        raise Unsupported(
            "a profile within parametrize.cached() would count parametrized weights for the first of the runs that it "
            "makes, and for no other: take it outside, and let cached() span the model's forward alone"
        )


@contextlib.contextmanager
def told(modules: Callable[[], Iterable[nn.Module]]) -> Iterator[None]:
    """A run of a block again; where it differs from the first, the error says what a cache may have to do with it.
    `modules` gives the block's.
    """
    try:
        yield
    except RecomputationError as error:
        if not any(map(parametrize.is_parametrized, modules())):
            raise
        raise RecomputationError(f"{error.message}. Its weights are parametrized, and {_advice()}") from error


def _advice() -> str:
    if _compat.weights_are_cached():
        return "parametrize.cached() is in force in the backward: let it end with the forward, before the backward"
    return "where parametrize.cached() is in force in the forward, only the first call computes them: leave it out"
