"""Key-value caches of transformers: a recomputed block must not see the keys and values of its own forward.

A layer adds its keys and values to the cache that it is passed, so a recomputation would add them again. In training
the cache is empty when a layer gets it, and nothing reads it afterwards. So every run of a block, the first included,
gets a copy of its own. Attention then computes the same bits as without a plan, and no cache holds keys and values.
Layers in the same list that are not blocks (layer drop) get copies as well, so that blocks do not see their entries.

A cache that went through a training step therefore lacks that step's keys and values. Passing it to the model again, to
attend to them, is an error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..base.errors import Unsupported
from ..base.tree import children, tensors_inside

_MODULE = "transformers.cache_utils"


def with_own_caches(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A block's forward; one that copies caches among its arguments in every run, if the block gets any."""
    caches = sys.modules.get(_MODULE)
    if caches is None:
        return forward
    cache_class = caches.Cache
    for value in (*args, *kwargs.values()):
        if isinstance(value, cache_class):
            break
    else:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = own_caches(args, kwargs)
        return forward(*args, **kwargs)

    return run


_lacking: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that went through a training step


def mark_caches(values: Iterable[Any]) -> None:
    """Mark the caches among a model's arguments and outputs of a training step: they lack its keys and values."""
    _lacking.update(_caches_in(values))


def refuse_incomplete_caches(values: Iterable[Any]) -> None:
    """Raise Unsupported if a model is passed a cache that lacks the keys and values of an earlier step."""
    if _lacking and any(cache in _lacking for cache in _caches_in(values)):
        raise Unsupported(
            "this cache of keys and values (past_key_values) went through a training step of a planned model, which "
            "leaves nothing in it, so these tokens would not see those of that step: pass them all in one call, or "
            "remove the plan"
        )


def refuse_learned_caches(name: str, values: Iterable[Any]) -> None:
    """Raises Unsupported if the block of this name is passed a cache with keys and values that have gradients."""
    for cache in _caches_in(values):
        if any(tensor.requires_grad for _, tensor in tensors_inside(cache)):
            raise Unsupported(
                f"'{name}' is passed a cache of keys and values that have gradients (past_key_values, as in prefix "
                "tuning), and cannot be recomputed from that: pass what they are made of among the inputs (as prompt "
                "tuning does), or train this without a plan"
            )


def _caches_in(values: Iterable[Any]) -> Iterator[Any]:
    if _MODULE in sys.modules:
        for value in values:
            yield from filter(_is_cache, (value, *(item for _, item in children(value) or ())))


def own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of the caches among them."""
    copies = tuple(_copied(value) if _is_cache(value) else value for value in args)
    return copies, {key: _copied(value) if _is_cache(value) else value for key, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    caches = sys.modules.get(_MODULE)
    return caches is not None and isinstance(value, caches.Cache)


def _copied(value: Any) -> Any:
    """A copy of a cache with new objects and containers and the same tensors, which layers replace and never write."""
    cls = type(value)
    if cls is list:
        return [_copied(item) for item in value]
    if cls is dict:
        return {key: _copied(item) for key, item in value.items()}
    if not any(base.__module__ == _MODULE for base in cls.__mro__):
        return value
    copy: Any = object.__new__(cls)
    vars(copy).update({name: _copied(item) for name, item in vars(value).items()})
    return copy
