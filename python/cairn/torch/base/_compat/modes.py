"""Dispatch modes and function modes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._python_dispatch

from .compilers import _eval_frame


@contextlib.contextmanager
def function_mode_set_aside(mode: Any) -> Iterator[None]:
    """Removes the innermost torch function mode for the body, if it is this one, because it takes time."""
    innermost = getattr(torch.overrides, "_get_current_function_mode", None)
    if innermost is None or innermost() is not mode:
        yield
        return
    torch.overrides._pop_mode()
    try:
        yield
    finally:
        torch.overrides._push_mode(mode)


class FunctionMode(torch.overrides.TorchFunctionMode):
    """A function mode that is inactive in code that torch.compile traces.

    The bodies of higher-order operators are traced when they are called.
    """

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch's."""
        raise NotImplementedError

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        return self.call(function, args, kwargs or {})


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """A dispatch mode that torch.compile does not trace.

    To ensure this, torch imports its whole compiler at the first operation, which takes seconds. As long as that
    was not imported, nothing is compiled. Then this mode does without the import.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        plain = cls.__torch_dispatch__
        hidden = torch._disable_dynamo(plain) if _hides_modes else plain  # type: ignore[attr-defined]

        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (hidden if "torch._dynamo" in sys.modules else plain)(self, *args, **kwargs)

        _skip_frames_of(dispatch)
        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


def _skip_frames_of(function: Any) -> None:
    """Keeps torch.compile from tracing the function, which `torch.compiler.disable` does only by importing it."""
    skip, strategy = getattr(_eval_frame, "skip_code", None), getattr(_eval_frame, "_FrameExecStrategy", None)
    if skip is not None:
        skip(function.__code__)
    elif strategy is not None:
        action = _eval_frame._FrameAction
        _eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))


_hides_modes = hasattr(torch.utils._python_dispatch.TorchDispatchMode, "_should_skip_dynamo")


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Hides operators in the body from all dispatch modes, if torch can."""
    disabled = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
    return contextlib.nullcontext() if disabled is None else disabled()


@contextlib.contextmanager
def restoring_modes_on_failure() -> Iterator[None]:
    """Restores saved-tensor hooks and grad mode if the body fails.

    An interrupt may come while they change, outside of torch's own `with` statements.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)
    hooks, is_enabled = top(True), torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(is_enabled)
        while (innermost := top(True)) is not None and innermost != hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        raise
