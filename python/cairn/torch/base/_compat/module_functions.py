"""Functions that modules and parameters go through: cached weights, custom functions, hooks, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils.parametrize


def is_convolution(module: Any) -> bool:
    """Whether a module is one of torch's own convolutions."""
    return isinstance(module, torch.nn.modules.conv._ConvNd)


def weights_are_cached() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is active; False if torch does not say."""
    return bool(getattr(torch.nn.utils.parametrize, "_cache_enabled", False))


def cached_weights() -> dict[tuple[int, str], torch.Tensor]:
    """The cache of `parametrize.cached()` itself, by module identity and name. An empty dict if it is inactive."""
    cache: dict[tuple[int, str], torch.Tensor] = getattr(torch.nn.utils.parametrize, "_cache", {})
    return cache if weights_are_cached() else {}


def caches_as(module: Any) -> int:
    """The identity under which that cache has the weights of a module.

    A copy of a module has that of the original, which the functions of its class refer to.
    """
    getters = [each.fget for each in vars(type(module)).values() if isinstance(each, property)]
    for function in [cell.cell_contents for each in getters for cell in getattr(each, "__closure__", None) or ()]:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "module" in names:
            return id(function.__closure__[names.index("module")].cell_contents)
    return id(module)


@contextlib.contextmanager
def caching_weights(cache: dict[tuple[int, str], torch.Tensor] | None) -> Iterator[None]:
    """`parametrize.cached()` is active in the body, with these weights in its cache. None: it is inactive."""
    places: Any = torch.nn.utils.parametrize
    if not hasattr(places, "_cache_enabled"):
        yield
        return
    before = places._cache_enabled, places._cache
    places._cache_enabled, places._cache = (0, {}) if cache is None else (1, dict(cache))
    try:
        yield
    finally:
        places._cache_enabled, places._cache = before


@contextlib.contextmanager
def intercepted_arguments(change: Callable[[Any], Any]) -> Iterator[None]:
    """In the body, functions of `torch.autograd.Function` get their arguments from `change`. No mode sees them."""
    base: Any = torch.autograd.Function
    before = vars(base)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change((args, kwargs))
        return before.__get__(None, cls)(*args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = before


def parameter_hooks(parameter: torch.Tensor) -> list[dict[Any, Any]]:
    """The hooks that run when a parameter gets its gradient, each collection as it is, to be emptied and refilled."""
    collections = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hooks for hooks in collections if hooks]


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Run the body as if no autocast region were open: the cache is empty, and is emptied again at the end."""
    depth = 0
    try:
        while torch.autocast_decrement_nesting() >= 0:
            depth += 1
        torch.clear_autocast_cache()
        torch.autocast_increment_nesting()
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()
