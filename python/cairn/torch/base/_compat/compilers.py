"""The state of torch.compile in this thread, and its guards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from ..errors import Unsupported
from .fake_tensors import FakeMode


def compiled_inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile` was given, if it made this one; else None."""
    is_optimized = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return module._modules.get("_orig_mod") if is_optimized else None


def is_traced() -> bool:
    """Whether the running code is traced instead of computed: by torch.jit.trace, fake tensors, make_fx or export.

    A step that is estimated on fake tensors is not traced; it runs as any other.
    """
    if torch._C._is_tracing():
        return True
    modes = map(_dispatch_mode, _TRACING_MODES)
    return any(mode is not None and not isinstance(mode, FakeMode) for mode in modes)


_dispatch_mode: Callable[[Any], Any] = getattr(torch._C, "_get_dispatch_mode", lambda key: None)

_mode_keys = getattr(torch._C, "_TorchDispatchModeKey", None)

_TRACING_MODES = [getattr(_mode_keys, name) for name in ("FAKE", "PROXY") if hasattr(_mode_keys, name)]


def compiler_is_active() -> bool:
    """Whether torch.compile traces the code that runs now, or runs it between parts that it has traced."""
    if "torch._dynamo" not in sys.modules:
        return False
    return torch.compiler.is_compiling() or (_frame_callback is not None and callable(_frame_callback()))


_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

_frame_callback = getattr(_eval_frame, "get_eval_frame_callback", None)


@contextlib.contextmanager
def observed_compiled_calls(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` at each call in this thread of a function or module compiled by torch.compile.

    If the compiler was never imported, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return

    def called(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in ("compile_wrapper", "_fn") and "callback" in code.co_freevars:
            call()

    before: Any = sys.getprofile()
    if before is not None and not callable(before) and not hasattr(before, "enable"):
        raise Unsupported(
            f"a profiler of Python runs in this thread ({type(before).__module__}) that could not go on after a look "
            "for compiled functions: stop it while a model is planned"
        )
    sys.setprofile(called)
    try:
        yield
    finally:
        _profile_by(before)


def _profile_by(profiler: Any) -> None:
    """Sets the profiler of this thread to a result of `sys.getprofile`; the profiler of cProfile is no function."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


def is_compiled_function(function: Any) -> bool:
    """Whether torch.compile has made it, of another one."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def modules_compiled_with(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """The modules that run inside of a compiled one; none in every other module."""
    inside = module if is_compiled_in_place(module) else compiled_inside(module)
    if inside is not None:
        return inside.modules()
    return list(module.modules())[1:] if is_compiled_function(module.forward) else ()


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `Module.compile` was called on it."""
    return getattr(module, "_compiled_call_impl", None) is not None
