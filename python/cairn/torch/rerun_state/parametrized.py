"""Weights that are computed at every use (`torch.nn.utils.parametrize`), and the cache that keeps them for a while.

Within `parametrize.cached()`, the first use of a weight computes and caches it, and later uses read the cache. So the
operations of a block depend on the cache, and a recomputation gets the cache as it was before the forward. A profile is
taken outside of the cache; inside, only the first of its runs would count the weights.
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
    """The cached weights of modules, by the identity of a module and a name."""
    cache = _compat.cached_weights()
    own = set(map(_compat.caches_as, modules)) if cache else set()
    return {key: weight for key, weight in cache.items() if key[0] in own}


class CachedWeights:
    """The cached weights of modules, to be restored."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules) if _compat.weights_are_cached() else []
        self._own = frozenset(map(_compat.caches_as, modules))
        self._weights = cached_weights(modules)

    def restore(self) -> None:
        """Restore them, and remove other weights of these modules from the cache."""
        cache = _compat.cached_weights() if self._own else {}
        for key in [key for key in cache if key[0] in self._own]:
            del cache[key]
        if self._own and _compat.weights_are_cached():
            cache.update(self._weights)


class ForwardWeights:
    """The cached weights before a block's forward, detached."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        weights = cached_weights(modules)
        self._weights = {key: (weight.detach(), weight.requires_grad) for key, weight in weights.items()}

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Restore these weights in the cache for the body."""
        made = {key: weight.detach().requires_grad_(has) for key, (weight, has) in self._weights.items()}
        return _compat.caching_weights(made)


def restored_cache(weights: ForwardWeights | None) -> contextlib.AbstractContextManager[None]:
    """Run the body with the cache as it was before the forward, or without a cache if there was none."""
    return _compat.caching_weights(None) if weights is None else weights.in_force()
