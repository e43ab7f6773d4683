"""Dynamo: its settings and errors, and the module that torch.compile returns."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .compiler_budget import many_graphs

_LOGGER_METHODS = ("debug", "info", "warning", "error", "warning_once", "info_once", "warning_advice")
_SETTINGS = {"trace_autograd_ops": True, "fail_on_recompile_limit_hit": True, "suppress_errors": False}

# Of this thread. is_active: the settings hold. patch: the latest one, which was made for `changed`.
_of_thread = threading.local()


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Dynamo's settings for calls of compiled code: it ignores calls of loggers and traces `autograd.grad`.

    One function may also be compiled for many shapes. Nothing runs as it is instead, after an error or too many
    compilations: that would take more memory than was planned.
    """
    if getattr(_of_thread, "is_active", False):
        yield
        return
    _of_thread.is_active = True
    try:
        with _patch_of_settings():
            yield
    finally:
        _of_thread.is_active = False


def _patch_of_settings() -> Any:
    """The patch of Dynamo's settings. It is used again by every call: each one makes a class and a context variable."""
    from torch._dynamo import config

    ignored = next((n for n in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(config, n)), None)
    methods = {getattr(logging.Logger, method) for method in _LOGGER_METHODS if hasattr(logging.Logger, method)}
    changed: dict[str, Any] = {} if ignored is None else {ignored: getattr(config, ignored) | methods}
    changed |= many_graphs()  # every shape of a model is one more compilation of the same forward
    if getattr(_of_thread, "changed", None) != changed:
        fixed = {name: value for name, value in _SETTINGS.items() if hasattr(config, name)}
        _of_thread.changed, _of_thread.patch = changed, config.patch(changed | fixed)
    return _of_thread.patch


def capture_error() -> type[Exception]:
    """The exception that Dynamo raises for code that it cannot capture as one graph."""
    from torch._dynamo import exc

    return exc.Unsupported


def recompile_limit_error() -> type[Exception]:
    """The exception that Dynamo raises for a function that it has compiled too many times."""
    from torch._dynamo import exc

    return exc.FailOnRecompileLimitHit


def operator_capture_error() -> type[Exception]:
    """The exception that Dynamo raises for a higher-order operator (`torch.cond`) whose functions it cannot capture."""
    from torch._dynamo import exc

    return exc.UncapturedHigherOrderOpError


@functools.lru_cache(maxsize=1)
def own_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile captures as it is.

    Dynamo calls functions of torch's own modules from a frame of its own. The code of that frame would be the same for
    all of them, and their compilations would count towards one limit.
    """
    from torch._dynamo import external_utils, trace_rules

    return external_utils.wrap_inline(function) if trace_rules.check(function) else function


def skip_tracing_of(package: str) -> None:
    """Keep Dynamo from tracing a package's functions, for the rest of the process.

    It would trace hooks, for example, that run while a frame runs that it could not capture.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(package)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_WRAPPER = "wrapper"  # in the `__dict__` of a module


def with_wrapped_calls(compiled: Any, wrapper: Wrapper) -> Any:
    """Put a wrapper around the calls of a module that torch.compile returned, and of its copies. Returns the module."""
    compiled.__class__ = _wrapped_module_type()
    compiled.__dict__[_WRAPPER] = wrapper
    compiled.forward = wrapper(compiled.forward)
    return compiled


def has_wrapped_calls(module: Any) -> bool:
    """Whether there is a wrapper around the calls of a module, by `with_wrapped_calls` or as of a copy."""
    return _WRAPPER in vars(module)


@functools.lru_cache(maxsize=1)
def _wrapped_module_type() -> type:
    from torch._dynamo.eval_frame import OptimizedModule

    class WrappedModule(OptimizedModule):
        """A compiled module with a wrapper around its calls. A copy of the module has a copy of the wrapper."""

        def __copy__(self) -> Any:
            return _wrapped_again(*self._parts())

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return _wrapped_again(*copy.deepcopy(self._parts(), memo))

        def _parts(self) -> tuple[Any, Any, Any]:
            return self._orig_mod, self.dynamo_ctx, self.__dict__[_WRAPPER]

        def __reduce__(self) -> Any:
            raise pickle.PicklingError(
                "a model that cairn.torch.compile returned cannot be pickled with its plan: pickle the model that it "
                "was given (or model.state_dict()), and compile that again"
            )

    return WrappedModule


def _wrapped_again(model: Any, context: Any, wrapper: Wrapper) -> Any:
    from torch._dynamo.eval_frame import OptimizedModule

    return with_wrapped_calls(OptimizedModule(model, context), wrapper)
