"""Weights that are computed at every use (`torch.nn.utils.parametrize`), and the cache that keeps them for a while.

Within `parametrize.cached()` a weight is computed by whoever uses it first. A run of a block that finds it there does
something else than one that does not. So a later run finds what the first one found; and a profile is taken outside of
it, for in a cache around all of its runs, weights would count for the first of them alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import nn

from ..base import _compat
from ..base.errors import Unsupported


def refuse_cache() -> None:
    """Raises Unsupported where weights are cached."""
    if _compat.weights_are_cached():
        raise Unsupported(
            "a profile within parametrize.cached() would count parametrized weights for the first of the runs that it "
            "makes, and for no other: take it outside, and let cached() span the model's forward alone"
        )


def cached_weights(modules: Iterable[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """The weights of modules that the cache has, by the identity of a module and a name."""
    cache = _compat.cached_weights()
    own = set(map(_compat.caches_as, modules)) if cache else set()
    return {key: weight for key, weight in cache.items() if key[0] in own}


class CachedWeights:
    """What the cache has of modules' weights, to be put back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules) if _compat.weights_are_cached() else []
        self._own = frozenset(map(_compat.caches_as, modules))
        self._found = cached_weights(modules)

    def restore(self) -> None:
        """Makes the cache have no others."""
        cache = _compat.cached_weights() if self._own else {}
        for key in [key for key in cache if key[0] in self._own]:
            del cache[key]
        if self._own and _compat.weights_are_cached():
            cache.update(self._found)


class FoundWeights:
    """What a block's first run found in the cache, without its history."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = cached_weights(modules)
        self._found = {key: (weight.detach(), weight.requires_grad) for key, weight in found.items()}

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """A later run finds the same."""
        made = {key: weight.detach().requires_grad_(has) for key, (weight, has) in self._found.items()}
        return _compat.caching_weights(made)


def as_found(found: FoundWeights | None) -> contextlib.AbstractContextManager[None]:
    """A later run finds the cache in force, or not, as the first run did."""
    return _compat.caching_weights(None) if found is None else found.in_force()
