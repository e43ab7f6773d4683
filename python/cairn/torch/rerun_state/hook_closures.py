"""The objects that hooks on modules can change: hooks often collect features of inner modules.

A hook stores what it collects in a container, an object or another module, which it reads from its closure, its
defaults, its `self` or a global name. An extra run of a block (`attributes.py`) must not change these either, and what
a run stores there takes memory.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

_ROOT = __package__.partition(".")[0]
_PLUG_IN = __package__.rpartition(".")[0] + "."
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", _ROOT)) - {"__main__"}
_FUNCTIONS_DEEP = 3  # the most functions between a hook and the object that it changes
CONTAINERS = (list, dict, set, collections.deque)
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_HOOKS_OF_ALL = (
    all_modules._global_forward_pre_hooks,
    all_modules._global_forward_hooks,
    all_modules._global_backward_pre_hooks,
    all_modules._global_backward_hooks,
)
_PLACES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "forward")


def objects_of_hooks(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    """The containers, modules and objects that hooks on these modules may change, each once, with hook and name."""
    hooks = [(module, hook) for module in modules if any(map(vars(module).get, _PLACES)) for hook in _hooks_of(module)]
    if any(_HOOKS_OF_ALL) and modules:
        hooks += [(modules[0], hook) for registry in _HOOKS_OF_ALL for hook in registry.values()]
    seen = set(map(id, modules)) if hooks else set()
    for module, hook in hooks:
        if hook is not None:
            for name, value in _mutable_objects(hook, "a hook", _FUNCTIONS_DEEP):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield module, name, value


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for registry in map(vars(module).get, _PLACES):
        yield from registry.values() if isinstance(registry, dict) else (registry,)


def _mutable_objects(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The objects that a callable may change; or the value itself, if it is a container or an object."""
    if isinstance(value, CALLABLES):
        left = depth - isinstance(value, types.FunctionType)
        for own, inner in referenced_objects(value) if left >= 0 else ():
            yield from _mutable_objects(inner, own or name, left)
    elif isinstance(value, (nn.Module, *CONTAINERS)) or is_own_object(value):
        yield name, value


def referenced_objects(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a user's function, bound method or partial function refers to, by name if there is one."""
    if isinstance(value, types.FunctionType):
        if not is_of_library(value.__module__):
            yield from _variables(value)
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    else:
        yield from (("", inner) for inner in (value.func, *value.args, *value.keywords.values()))


def captured_values(function: Any, depth: int = _FUNCTIONS_DEEP) -> Iterator[Any]:
    """The objects that a loss (a function, a module or an object) refers to, in which tensors may be that it reads."""
    if isinstance(function, nn.Module):
        yield from (*function.parameters(), *function.buffers())
    elif isinstance(function, CALLABLES) and depth:
        for _, value in referenced_objects(function):
            yield from captured_values(value, depth - 1)
        if isinstance(function, types.FunctionType) and not is_of_library(function.__module__):
            named = map(function.__globals__.get, sorted(names_in(function.__code__)))
            yield from (value for value in named if isinstance(value, torch.Tensor))
    elif is_own_object(function):
        yield from (value for value in own_names(function).values() if isinstance(value, torch.Tensor))
    else:
        yield function


def is_own_object(value: Any) -> bool:
    """Whether it is an object with attributes whose class is the user's."""
    return has_attributes(value) and not is_of_library(type(value).__module__)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that a function refers to, by name: closure variables, defaults, and containers among its globals."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell.cell_contents
    yield from ((f"a default of {function.__name__}", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name in sorted(names_in(code) & function.__globals__.keys()):
        if isinstance(function.__globals__[name], CONTAINERS):
            yield name, function.__globals__[name]


def names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that code reads, code of inner functions included."""
    return {name for each in _codes_in(code) for name in each.co_names if not name.startswith("__")}


def texts_in(code: types.CodeType) -> set[str]:
    """The strings in code, inner functions included, that may be names for `getattr`."""
    texts = (text for each in _codes_in(code) for text in each.co_consts if isinstance(text, str))
    return set(filter(str.isidentifier, texts))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def is_of_library(module: str | None) -> bool:
    """Whether code of this module is not followed."""
    return module is None or module.partition(".")[0] in _LIBRARIES


def has_attributes(value: Any) -> bool:
    """Whether it is something with attributes of its own that is neither a module nor the plug-in's."""
    return own_names(value) is not None


def own_names(value: Any) -> Any:
    """The attributes of such an object, without calling attribute functions of its class; None for other values."""
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return None
    if str(type(value).__module__).startswith(_PLUG_IN):
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except Exception:  # there is none, or its class has something else under this name
        return None
