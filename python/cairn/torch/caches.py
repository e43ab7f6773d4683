"""Key-value caches of transformers: a block's run must not see what an earlier run of the same block put there.

A layer adds its keys and values to the cache that it is passed, so a second run would add them again. In training the
cache is empty when a layer gets it, and nobody reads it afterwards. So every run of a block, the first one too, gets a
copy of its own: attention computes what it computes plainly, to the bit, and no keys and values are held by a cache.
Layers that lie in a list beside blocks and are none (layer drop) get copies as well, so that blocks are not passed what
those have put there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MODULE = "transformers.cache_utils"


def with_own_caches(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A block's forward, or one that copies the caches among its arguments in every run, if there are any."""
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


def own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of the caches among them."""
    copies = tuple(_copied(value) if _is_cache(value) else value for value in args)
    return copies, {key: _copied(value) if _is_cache(value) else value for key, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    caches = sys.modules.get(_MODULE)
    return caches is not None and isinstance(value, caches.Cache)


def _copied(value: Any) -> Any:
    """Objects and containers of a cache are new, its tensors the same: layers replace them, and do not write them."""
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
