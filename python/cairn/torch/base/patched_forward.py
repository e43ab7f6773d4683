"""Replaces the `forward` of single modules, and changes nothing else about them.

The replacement is in the instance's `__dict__`; the class keeps its own `forward`. There is no renaming and no wrapper
module; `state_dict`, hooks and type stay the same. A copy or a pickle of a module must not contain the replacement,
which belongs to the original, so the instance also gets a `__reduce_ex__` that leaves both out. A replica made by
`nn.DataParallel` shares the `__dict__`; making one is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from . import _compat
from .errors import Unsupported

#: Called instead of a module's forward: (what it would have run, its arguments) -> its output.
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_REPLICATE = "_replicate_for_data_parallel"

#: The attributes that a module gets for a plan.
PATCHED_NAMES = frozenset(("forward", "__reduce_ex__", _REPLICATE))


class _NoCode(Unsupported, AttributeError):
    """The error for a missing attribute. It is an AttributeError, too, so `hasattr` is False."""


class PatchedForward:
    """Stands for a module's `forward` until it is removed."""

    carries_out_a_plan = True  # others do not keep a model from being planned

    def __init__(
        self, module: nn.Module, handler: Handler, owner: object = None, is_of_submodule: bool = False
    ) -> None:
        self._module = weakref.ref(module)
        self._handler: Handler | None = handler
        self.is_of_submodule = (
            is_of_submodule  # of a block, and of no meaning to anybody else: it may be compiled without
        )
        self._owner = owner  # lives as long as this does
        self._others: dict[str, Any] = {"__reduce_ex__": _Reducer(module)}
        if hasattr(type(module), _REPLICATE):
            self._others[_REPLICATE] = _refuse_replica
        mine = self._mine()
        self._before = {key: vars(module)[key] for key in mine if key in vars(module)}
        vars(module).update(mine)

    def _mine(self) -> dict[str, Any]:
        """The attributes that are put into the module. Storing them here would make a reference cycle."""
        return {"forward": self, **self._others}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the module's forward."""
        handler = self._handler
        if handler is not None and _compat.compiler_is_active():
            if not self.is_of_submodule:
                raise Unsupported(
                    "a planned model, or a block of one, cannot be compiled: its schedule is carried out by hooks, "
                    "which torch.compile does not see; put torch.compile(block) in the place of each block before "
                    "planning"
                )
            handler = None
        if args and args[0] is self._module():
            args = args[1:]  # as a method, this was bound to the module once more: accelerate's unwrap_model does that
        forward = self.original()
        return forward(*args, **kwargs) if handler is None else handler(forward, args, kwargs)

    @property
    def module(self) -> nn.Module | None:
        """The module whose forward it replaces."""
        return self._module()

    def original(self) -> Callable[..., Any]:
        """The forward that would run without this."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module of this forward is gone")
        before = self._before.get("forward")
        return before if before is not None else _of_class(module)

    def remove(self) -> None:
        """Restore the module. If someone else has replaced `forward` since, theirs stays, and this one only calls the
        original.
        """
        self._handler = self._owner = None
        module = self._module()
        if module is None:
            return
        own = vars(module)
        for key, value in self._mine().items():
            if own.get(key) is value:
                del own[key]
                if key in self._before:
                    own[key] = self._before[key]

    def __getattr__(self, name: str) -> Any:
        """Raises for attributes of functions, such as their code."""
        if name in ("__code__", "__globals__"):
            raise _NoCode(
                "the forward of a planned model stands for another one, and has no code to be scripted or exported: "
                "remove the plan first (cairn.torch.handle(model).remove())"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that this one wraps. accelerate, for example, follows `__wrapped__` to its own wrapper."""
        if self._module() is None:
            raise AttributeError("the module of this forward is gone")
        return self.original()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original())

    @property
    def __name__(self) -> str:
        return "forward"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For classes that copy their `__dict__` themselves: the copy gets a forward of its own."""
        module = self._module()
        copy = memo.get(id(module))
        return self if copy is None else _of_class(copy)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")  # which is its class's, while it is being made again


class _Reducer:
    """`__reduce_ex__` of a module whose forward is patched: copies and pickles get the module without the patch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None
        reduced = type(module).__reduce_ex__(module, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        construct, *rest = (tuple(map(_clean, part)) if isinstance(part, tuple) else _clean(part) for part in reduced)
        return (construct, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reducer:
        """For classes that copy their `__dict__` themselves."""
        copy = memo.get(id(self._module()))
        return self if copy is None else _Reducer(copy)


def _clean(value: Any) -> Any:
    return without_patches(value) if isinstance(value, dict) else value


def without_patches(state: dict[str, Any]) -> dict[str, Any]:
    """A module's `__dict__` as it would be without patches."""
    forward = state.get("forward")
    if not any(_is_patch(state.get(key)) for key in PATCHED_NAMES):
        return state
    clean = {key: value for key, value in state.items() if not (key in PATCHED_NAMES and _is_patch(value))}
    if isinstance(forward, PatchedForward):
        clean.update(without_patches(forward._before))
    return clean


def _is_patch(value: Any) -> bool:
    """Whether an attribute was put there by a patch."""
    return isinstance(value, (PatchedForward, _Reducer)) or value is _refuse_replica


def names_but_handlers(state: dict[str, Any]) -> list[str]:
    """The attributes in a module's `__dict__`, without those that a submodule patch has put there."""
    names, forward = list(state), state.get("forward")
    is_part = isinstance(forward, PatchedForward) and forward.is_of_submodule
    return [name for name in names if name not in PATCHED_NAMES] if is_part else names


def is_copied_as_usual(module: nn.Module) -> bool:
    """Whether a module is copied and pickled by its `__dict__`, as most modules are."""
    cls, own = type(module), ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(cls, name, None) is getattr(nn.Module, name, None) for name in own)


def _of_class(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module has from its class, be it a method or static."""
    cls = type(module)
    for base in cls.__mro__:
        if "forward" in base.__dict__:
            forward = base.__dict__["forward"]
            break
    bound: Callable[..., Any] = forward.__get__(module, cls) if hasattr(forward, "__get__") else forward
    return bound


def _refuse_replica() -> Any:
    raise Unsupported(
        "nn.DataParallel makes replicas of the model in every step, which a plan does not cover; use "
        "DistributedDataParallel"
    )
