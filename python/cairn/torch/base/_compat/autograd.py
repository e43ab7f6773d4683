"""Backwards, hooks on saved tensors, and transforms."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from .compilers import is_traced

_REAL_CLASSES = (torch.Tensor, torch.nn.Parameter)

#: A number that tells apart the backwards that run one after the other in this thread; -1 outside of any.
backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def transforms_are_active() -> bool:
    """Whether torch.func (grad, vmap, jvp, ...) transforms the running code, or forward-mode differentiation is on.

    False if torch does not say.
    """
    transformed = _transform is not None and _transform() is not None
    return transformed or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph for another one; True if torch does not say."""
    return True if _graph_kept is None else bool(_graph_kept())


_graph_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def saved_tensor_hooks_are_active(mine: Callable[[torch.Tensor], Any] | None = None) -> bool:
    """Whether saved-tensor hooks are active in this thread, other than those that pack with `mine`.

    If torch cannot report whose hooks are in force, hooks besides `mine` are not detected.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return mine is None and _hooks_take_what_is_saved()
    hooks = top(True)
    return hooks is not None and hooks[0] != mine


def hooks_but_on_traced(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Hooks on saved tensors that leave alone what a graph saves while torch traces it.

    Higher-order operators (scan, cond, ...) differentiate their bodies on fake tensors within a call. Such a graph is
    no part of the model's, and is gone when the call ends.
    """

    def pack_but_traced(tensor: torch.Tensor) -> Any:
        if type(tensor) not in _REAL_CLASSES and is_traced():
            return _Traced(tensor.detach())
        return pack(tensor)

    def unpack_but_traced(packed: Any) -> Any:
        return packed.tensor if type(packed) is _Traced else unpack(packed)

    return pack_but_traced, unpack_but_traced


def saved_tensors_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> torch.autograd.graph.saved_tensors_hooks:
    """The context of torch's of that name, whose hooks leave alone what a graph saves while torch traces it."""
    return torch.autograd.graph.saved_tensors_hooks(*hooks_but_on_traced(pack, unpack))


class _Inner(threading.local):
    replacing: Callable[[Any, Any], tuple[Any, Any]] | None = None


_inner = _Inner()
_replacers = 0  # of all threads
_replacers_lock = threading.Lock()
_enter_plainly = torch.autograd.graph.saved_tensors_hooks.__enter__


class InnerHooks:
    """Replaces the saved-tensor hooks that code of this thread sets while it is active.

    `replacing` gets their pack and unpack hook, and returns the hooks to use instead.

    Torch calls the innermost hooks only, so hooks outside do not see what is saved under these.
    """

    __slots__ = ("_before", "_replacing")

    def __init__(self, replacing: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self._replacing = replacing

    def __enter__(self) -> None:
        self._before, _inner.replacing = _inner.replacing, self._replacing
        _count_replacers(1)

    def __exit__(self, *error: object) -> None:
        _count_replacers(-1)
        _inner.replacing = self._before


def _count_replacers(change: int) -> None:
    """Torch's class is changed as long as there are any."""
    global _replacers
    with _replacers_lock:
        _replacers += change
        enter = _enter if _replacers else _enter_plainly
        torch.autograd.graph.saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def _enter(self: torch.autograd.graph.saved_tensors_hooks) -> None:
    if _inner.replacing is None:
        _enter_plainly(self)
    else:
        hooks = _inner.replacing(self.pack_hook, self.unpack_hook)
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


class _Traced:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def is_in_reentrant_checkpoint() -> bool:
    """Whether this runs in the forward of a torch.utils.checkpoint with use_reentrant=True, which records no graph."""
    if torch.is_grad_enabled():
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _hooks_take_what_is_saved() -> bool:
    with torch.enable_grad():
        saved = torch.zeros((), device="cpu", requires_grad=True).exp().grad_fn._raw_saved_result  # type: ignore[union-attr]
    try:
        saved.register_hooks(torch.Tensor.detach, torch.Tensor.detach)
    except RuntimeError as error:  # it has some, or they are forbidden
        return "already" in str(error)
    return False


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Like `tensor.register_hook`, at a third of its cost, but the hook cannot be removed."""
    register = getattr(tensor, "_register_hook_dict", None)
    if register is None:
        tensor.register_hook(hook)
    else:
        register({0: hook})


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the running backward has ended. Only code of that backward may call this."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
