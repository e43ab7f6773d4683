"""What is used of torch's private interfaces, each feature-detected, with a public fallback.

Only `_version`, `_base` and the registries of modules, which all versions have, are read elsewhere as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.utils.parametrize
import torch.utils._python_dispatch
from torch.utils.checkpoint import CheckpointFunction

from .errors import Unsupported

TORCH_VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


# -- storages ------------------------------------------------------------------------------------------------


def storage_id(tensor: torch.Tensor) -> int:
    """A number that names the tensor's storage for as long as that storage lives."""
    return int(tensor.untyped_storage()._cdata)


class StorageRef:
    """A weak reference to a storage; while one exists, the storage's identity is not given to another."""

    __slots__ = ("_storage", "key", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key: int = int(storage._cdata)
        self.nbytes: int = int(storage.nbytes())
        self._storage = storage._weak_ref()

    def alive(self) -> bool:
        return not torch.UntypedStorage._expired(self._storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if it is alive; None also where torch cannot say."""
        strong = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
        return strong(self._storage) if strong is not None else None

    def __del__(self) -> None:
        free = getattr(torch.UntypedStorage, "_free_weak_ref", None)
        if free is not None:  # absent while the interpreter shuts down
            free(self._storage)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its signs to be read the other way round, as the imaginary part of a conjugate has them."""
    return torch._neg_view(tensor)


class VersionWitness:
    """Tells whether a tensor was written in place since, without keeping its storage, if it has one."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias: torch.Tensor | None = None
        if not tensor.is_inference():
            self._version = int(tensor._version)
            self._alias = tensor.detach()  # shares the count of writes,
            if tensor.layout is torch.strided:
                self._alias.data = tensor.new_empty(0)  # and keeps it when it gets another storage

    def has_changed(self) -> bool:
        return self._alias is not None and self._alias._version != self._version


# -- allocator events of the CPU -----------------------------------------------------------------------------


class AllocatorEvents:
    """Records every allocation and release of the CPU allocator in this thread, and named marks between them.

    The event-list profiler keeps the order of events exactly and costs microseconds to start. Where torch no longer has
    it, the kineto profiler gives the same events with time stamps. Operators, which it would write down as well, are
    hidden from it.
    """

    def __init__(self) -> None:
        self.events: list[int | str] = []  # bytes allocated (positive) or released (negative); a string is a mark
        self._kineto: Any = None

    def start(self) -> None:
        _quiet.begin()  # else it warns of each release of what was there before
        enable = getattr(torch._C._autograd, "_enable_profiler_legacy", None)
        if enable is None:
            self._kineto = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self._kineto.__enter__()
            return
        from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

        enable(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        _show_functions(False)

    def mark(self, name: str) -> None:
        _show_functions(True)
        with torch.autograd.profiler.record_function(name):
            pass
        _show_functions(self._kineto is not None)

    def stop(self, prefix: str) -> None:
        """Ends the recording; marks are the events whose name begins with `prefix`."""
        _quiet.end()
        if self._kineto is None:
            _show_functions(True)
            self.events = _legacy_events(torch._C._autograd._disable_profiler_legacy(), prefix)
            return
        profiler, self._kineto = self._kineto, None
        profiler.__exit__(None, None, None)
        self.events = _kineto_events(profiler, prefix)


# whether this thread's operators and `record_function` show in profiles
_show_functions: Callable[[bool], None] = getattr(torch._C._autograd, "_enable_record_function", lambda shown: None)

LOG_ERRORS = 2


def _set_log_level(level: int) -> int | None:
    """Sets from where on torch's C++ side logs; returns what it was, None where it cannot be set."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        current = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
    before, current.value = current.value, level
    return before


class _Quiet:
    """While recordings go on, in whatever threads, torch's C++ side logs errors only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings = 0
        self._before: int | None = None

    def begin(self) -> None:
        with self._lock:
            if self._recordings == 0:
                self._before = _set_log_level(LOG_ERRORS)
            self._recordings += 1

    def end(self) -> None:
        with self._lock:
            self._recordings -= 1
            if self._recordings == 0 and self._before is not None:
                _set_log_level(self._before)


_quiet = _Quiet()


class BeforeProfilers:
    """While needed, in whatever threads, calls back before one of torch's profilers starts: there can be but one in a
    thread, and that would be refused. Only as far as torch starts them in the ways that it is known to.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._needs = 0
        self._replaced: dict[str, Any] = {}

    def begin(self) -> None:
        with self._lock:
            self._needs += 1
            if self._needs == 1:
                self._replaced = {n: vars(_profiler)[n] for n in _STARTING if n in vars(_profiler)}
                vars(_profiler).update({n: self._calling_back(start) for n, start in self._replaced.items()})

    def end(self) -> None:
        with self._lock:
            self._needs -= 1
            if self._needs == 0:
                vars(_profiler).update(self._replaced)

    def _calling_back(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def starting(*args: Any, **kwargs: Any) -> Any:
            self._callback()
            return start(*args, **kwargs)

        return starting


_profiler = torch.autograd.profiler
_STARTING = ("_prepare_profiler", "_enable_profiler")


def _legacy_events(threads: list[list[Any]], prefix: str) -> list[int | str]:
    events: list[int | str] = []
    for thread in threads:
        for event in thread:
            kind = event.kind()
            if kind == "memory_alloc":
                size = event.cpu_memory_usage()
                if size:
                    events.append(size)
            elif kind == "push" and event.name().startswith(prefix):
                events.append(event.name())
    return events


def _kineto_events(profiler: Any, prefix: str) -> list[int | str]:
    timed: list[tuple[int, int | str]] = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            timed.append((event.start_ns(), event.nbytes()))
        elif name.startswith(prefix):
            timed.append((event.start_ns(), name))
    timed.sort(key=lambda pair: pair[0])
    return [what for _, what in timed]


# -- what libraries keep on a device -------------------------------------------------------------------------


def clear_workspaces() -> None:
    """Gives back what cuBLAS keeps for its products; it takes it again when it needs it."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


# -- torch.compile -------------------------------------------------------------------------------------------


def compiled_inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile` made this one of; None for every other module."""
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def is_traced() -> bool:
    """Whether what runs now is written down, or only its shapes are found, instead of being computed: torch.jit.trace,
    fake tensors, make_fx, export.
    """
    return torch._C._is_tracing() or any(_dispatch_mode(key) is not None for key in _TRACING_MODES)


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
def compiled_calls_told(told: Callable[[], None]) -> Iterator[None]:
    """Tells of each call in this thread of a function or module that torch.compile has made. Where nobody has imported
    the compiler, nothing was compiled.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return

    def called(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in ("compile_wrapper", "_fn") and "callback" in code.co_freevars:
            told()

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
    """Makes what `sys.getprofile` returned the profiler of this thread again; that of cProfile is no function."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


def is_compiled_function(function: Any) -> bool:
    """Whether torch.compile has made it, of another one."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def parts_compiled_with(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """The modules that run inside of a compiled one; none in every other module."""
    inside = module if is_compiled_in_place(module) else compiled_inside(module)
    if inside is not None:
        return inside.modules()
    return list(module.modules())[1:] if is_compiled_function(module.forward) else ()


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `Module.compile` was called on it."""
    return getattr(module, "_compiled_call_impl", None) is not None


# -- what is as it was -----------------------------------------------------------------------------------------


class Looks:
    """Classes, shapes, strides, types and devices of tensors, which of them need gradients, and which are missing."""

    __slots__ = ("_are_missing", "_check")

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._are_missing = [tensor is None for tensor in tensors]
        self._check = _looks_check([tensor for tensor in tensors if tensor is not None])

    def hold(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether others surely look the same. Where torch does not tell, or one tensor is there twice, none do."""
        if self._check is None or len(tensors) != len(self._are_missing):
            return False
        if True not in self._are_missing:
            return self._check(*tensors)  # which tells if one is missing now
        are_missing = [tensor is None for tensor in tensors]
        return are_missing == self._are_missing and self._check(*[t for t in tensors if t is not None])


def _looks_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    guards: Any = getattr(_guards, "TensorGuards", None)
    try:
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except (AttributeError, RuntimeError, SystemError, TypeError):
        return None


_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


# -- what dicts hold -------------------------------------------------------------------------------------------


def contents(dicts: Iterable[dict[Any, Any]]) -> list[int] | None:
    """A number for each, which is another once something else is under any of its keys; None where torch does not tell.

    The order in a dict is not meant, nor what is changed within its values.
    """
    number = number_of_contents()
    try:
        return None if number is None else list(map(number, dicts))
    except SystemError:  # there is something else among them
        return None


def dicts_behind(proxies: Sequence[Any]) -> Sequence[Any]:
    """The dicts that `vars` of classes shows, only to be read; the views of them where the interpreter hides them."""
    behind = gc.get_referents(*proxies)
    return behind if len(behind) == len(proxies) else proxies


@functools.cache
def number_of_contents() -> Callable[[dict[Any, Any]], int] | None:
    """Of one dict; None where nothing tells it. From Python 3.12 on torch counts changes itself, and misses some."""
    number, at = getattr(_guards, "dict_version", None), number_at()
    if number is not None and tells_changes(number):
        return number
    return None if at is None else functools.partial(_number_in, at)


@functools.cache
def number_at() -> int | None:
    """Where in a dict the interpreter itself has its number; None where it has none (from Python 3.13 on)."""
    is_known = sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == WORD_BYTES
    if not is_known or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    found = [at for at in _IN_DICT if tells_changes(functools.partial(_number_in, at))]
    return found[0] if len(found) == 1 else None


Word = ctypes.c_uint64
WORD_BYTES = ctypes.sizeof(Word)
_IN_DICT = range(2 * WORD_BYTES, 6 * WORD_BYTES, WORD_BYTES)  # all that a dict itself has behind its class


def word(place: int) -> int:
    """What lies in memory there."""
    return Word.from_address(place).value


def _number_in(at: int, names: dict[Any, Any]) -> int:
    return word(id(names) + at)


class _Owner:
    """Has attributes."""


def tells_changes(number: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether a number of what is in a dict tells every change, however attributes and items are set, and no other dict
    has it.
    """
    owner = _Owner()
    names = vars(owner)
    ways: list[Callable[[object], Any]] = [
        functools.partial(_set_attribute, owner),
        functools.partial(setattr, owner, "value"),
        functools.partial(names.__setitem__, "value"),
        lambda value: names.update(value=value),
        lambda value: names.__ior__({"value": value}),
        lambda value: names.pop("value"),
        functools.partial(names.setdefault, "value"),
        lambda value: delattr(owner, "value"),
        functools.partial(_set_attribute, owner),
        lambda value: names.clear(),
    ]
    kind = type("Kind", (), {})
    ways_of_class: list[Callable[[object], Any]] = [
        functools.partial(_set_attribute, kind),
        functools.partial(setattr, kind, "value"),
        lambda value: delattr(kind, "value"),
    ]
    try:
        found = _numbers_through(number, names, ways)
        found += _numbers_through(number, dicts_behind([vars(kind)])[0], ways_of_class)
        return len(set(found)) == len(found)
    except Exception:
        return False


def _numbers_through(
    number: Callable[[dict[Any, Any]], int], names: Any, ways: Iterable[Callable[[object], Any]]
) -> list[int]:
    """Of a dict as it is, and after every change."""
    found = [number(names)]
    for _ in range(_TIMES):
        for way in ways:
            way(object())
            found.append(number(names))
    return found


_TIMES = 100  # after a few the interpreter has its own short way of doing it


def _set_attribute(owner: Any, value: object) -> None:
    owner.value = value


# -- the executor's --------------------------------------------------------------------------------------------


def version(tensor: torch.Tensor) -> int:
    """How often the tensor's storage was written in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """`version` of many at once; 0 for what is not there."""
    tensors = list(tensors)
    try:
        return list(map(_version_of, tensors))
    except (AttributeError, RuntimeError):  # one is missing, or an inference tensor
        return [0 if tensor is None else version(tensor) for tensor in tensors]


def addresses(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Where tensors begin in memory; 0 where there is none, or none that torch tells."""
    tensors = list(tensors)
    try:
        return list(map(address, tensors))
    except (RuntimeError, TypeError):  # one is missing, or has none
        return list(map(_address_or_none, tensors))


def _address_or_none(tensor: torch.Tensor | None) -> int:
    try:
        return 0 if tensor is None else address(tensor)
    except RuntimeError:
        return 0


address: Callable[..., int] = torch.Tensor.data_ptr
_version_of: Callable[[Any], int] = operator.attrgetter("_version")


#: A number that tells apart the backwards that run one after the other in this thread; -1 outside of any.
backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

#: `version` of a tensor that autograd saves, which is never an inference tensor; called for every one of them
saved_version: Callable[[torch.Tensor], int] = _version_of


@contextlib.contextmanager
def function_mode_set_aside(mode: Any) -> Iterator[None]:
    """Without a torch function mode, if it is the innermost one; with it, it only takes longer."""
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
    """A function mode that is not there for code that torch.compile traces, as higher-order operators have their bodies
    traced when they are called.
    """

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch's."""
        raise NotImplementedError

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        return self.call(function, args, kwargs or {})


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """A dispatch mode that torch.compile does not look into.

    To see to that, torch imports all of its compiler, which takes seconds, when the first operation comes. As long as
    nobody else has imported that, nothing is compiled, and there is no need.
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
    """Operators called inside are seen by nobody's dispatch mode; where torch cannot say so, by all of them."""
    disabled = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
    return contextlib.nullcontext() if disabled is None else disabled()


def transforms_are_active() -> bool:
    """Whether the code that runs now is being transformed by torch.func (grad, vmap, jvp, ...), or differentiated
    forward; False where torch does not say.
    """
    transformed = _transform is not None and _transform() is not None
    return transformed or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def graph_is_kept() -> bool:
    """Within a backward, whether its graph is kept for another; True where torch does not say."""
    return True if _graph_kept is None else bool(_graph_kept())


_graph_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def saved_tensor_hooks_are_active(mine: Callable[[torch.Tensor], Any] | None = None) -> bool:
    """Whether someone's saved-tensor hooks, other than those that pack with `mine`, are in force in this thread.

    Where torch does not say whose hooks are in force, none are found beside `mine`.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return mine is None and _hooks_take_what_is_saved()
    found = top(True)
    return found is not None and found[0] != mine


@contextlib.contextmanager
def modes_taken_back() -> Iterator[None]:
    """If the body fails, saved-tensor hooks and grad mode are as they were: an interrupt may come just as they change,
    where no `with` statement of torch's sees it.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)
    hooks, is_enabled = top(True), torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(is_enabled)
        while (found := top(True)) is not None and found != hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        raise


def hooks_but_on_traced(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Hooks on saved tensors that leave alone what a graph saves while torch traces it.

    Higher-order operators (scan, cond, ...) differentiate their bodies on fake tensors within a call. Such a graph is
    no part of the model's, and is gone when the call ends.
    """

    def pack_but_traced(tensor: torch.Tensor) -> Any:
        if type(tensor) not in PLAIN_CLASSES and is_traced():
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


class _Traced:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def is_in_reentrant_checkpoint() -> bool:
    """Whether this runs in the forward of a torch.utils.checkpoint with use_reentrant=True, which records no graph."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe()
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


def default_device() -> torch.device:
    """Where new tensors are made."""
    if _function_modes is not None and _function_modes() == 0 and _device_set() is None:
        return _CPU  # which torch takes long to say
    try:
        return torch.get_default_device()
    except AttributeError:  # in torch 2.6, after set_default_device(None)
        return torch.empty(0).device


_CPU = torch.device("cpu")
_function_modes = getattr(torch._C, "_len_torch_function_stack", None)  # a default device is one of these


def _device_set() -> Any:
    """What `set_default_device` has set in this thread."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tells apart the storages of tensors that are alive at once; 0 where a tensor has none."""
    if type(tensor) not in PLAIN_CLASSES or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


#: Classes of tensors that certainly are no wrappers of others.
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """`tensor.register_hook`, without a handle to take it back, at a third of its cost."""
    register = getattr(tensor, "_register_hook_dict", None)
    if register is None:
        tensor.register_hook(hook)
    else:
        register({0: hook})


def weights_are_cached() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is in force; False where torch does not say."""
    return bool(getattr(torch.nn.utils.parametrize, "_cache_enabled", False))


def cached_weights() -> dict[tuple[int, str], torch.Tensor]:
    """What `parametrize.cached()` has at hand, as it is, by the identity of a module and a name; where it is not in
    force, something empty.
    """
    found: dict[tuple[int, str], torch.Tensor] = getattr(torch.nn.utils.parametrize, "_cache", {})
    return found if weights_are_cached() else {}


def caches_as(module: Any) -> int:
    """The identity under which that cache has the weights of a module: of a copy, that of the module it was made from,
    which the functions of its class have in their closures.
    """
    getters = [each.fget for each in vars(type(module)).values() if isinstance(each, property)]
    for function in [cell.cell_contents for each in getters for cell in getattr(each, "__closure__", None) or ()]:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "module" in names:
            return id(function.__closure__[names.index("module")].cell_contents)
    return id(module)


@contextlib.contextmanager
def caching_weights(found: dict[tuple[int, str], torch.Tensor] | None) -> Iterator[None]:
    """`parametrize.cached()` is in force in the body, which finds these weights there; None: it is not in force."""
    places: Any = torch.nn.utils.parametrize
    if not hasattr(places, "_cache_enabled"):
        yield
        return
    before = places._cache_enabled, places._cache
    places._cache_enabled, places._cache = (0, {}) if found is None else (1, dict(found))
    try:
        yield
    finally:
        places._cache_enabled, places._cache = before


@contextlib.contextmanager
def functions_given(change: Callable[[Any], Any]) -> Iterator[None]:
    """In the body, functions of `torch.autograd.Function` get what `change` makes of their arguments: no mode sees
    them.
    """
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
    """As after the outermost autocast region: its cache is empty, and that of a new region goes when this one ends."""
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


def profiler_is_active() -> bool:
    """Whether some profiler records in this thread, so that another cannot."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None) or getattr(
        torch._C._autograd, "_profiler_enabled", None
    )
    return bool(enabled()) if enabled is not None else False


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that is running has ended; only from within that backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# -- which kernels run ---------------------------------------------------------------------------------------

_FLOAT32_OF = [
    ("generic", "all"),  # what others inherit from comes first
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
]
_PRECISIONS = {  # those that torch has under other names than the rest
    ("generic", "all"): "torch.backends.fp32_precision",
    ("cuda", "all"): "torch.backends.cuda.fp32_precision",
    ("mkldnn", "all"): "torch.backends.mkldnn.fp32_precision",
    ("cuda", "conv"): "torch.backends.cudnn.conv.fp32_precision",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn.fp32_precision",
}


def reader(name: str, public: Callable[[], Any]) -> Callable[[], Any]:
    """How to read a switch: the function of torch's own, without what a public one does around it, if there is that."""
    found: Callable[[], Any] = getattr(torch._C, name, public)
    return found


def attribute_reader(owner: Any, name: str) -> Callable[[], Any]:
    """The same of an attribute of one of torch's backends."""
    read = getattr(vars(type(owner)).get(name), "getter", None)
    return read if callable(read) else lambda: getattr(owner, name)


def kernel_switches() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The name, and how to read and to set it, of the precision of float32, first for many operations at once and then,
    where torch has that, for each kind of them; that of sums in cuBLAS; and the order in which kernels of attention are
    tried.
    """
    cudnn = torch.backends.cudnn
    precision = reader("_get_float32_matmul_precision", torch.get_float32_matmul_precision)
    yield ("torch.set_float32_matmul_precision", *_unless_mixed(precision, torch.set_float32_matmul_precision))
    allow_tf32 = attribute_reader(cudnn, "allow_tf32")
    tf32 = _unless_mixed(allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value))
    yield ("torch.backends.cudnn.allow_tf32", *tf32)
    get, set_ = (getattr(torch._C, f"_{verb}_fp32_precision_{verb}ter", None) for verb in ("get", "set"))
    if get is not None and set_ is not None:
        for which in _FLOAT32_OF:
            backend, operation = which
            name = f"torch.backends.{backend}.{operation}.fp32_precision"
            yield _PRECISIONS.get(which, name), functools.partial(get, *which), functools.partial(set_, *which)
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"):
        get, set_ = (getattr(torch._C, f"_{verb}_cublas_allow_{name}", None) for verb in ("get", "set"))
        if get is not None and set_ is not None:
            yield f"torch.backends.cuda.matmul.allow_{name}", get, functools.partial(_set_parts, set_)
    order, reorder = (getattr(torch._C, f"_{verb}_sdp_priority_order", None) for verb in ("get", "set"))
    if order is not None and reorder is not None:
        yield "sdpa_kernel(set_priority=True)", lambda: tuple(order()), lambda value: reorder(list(value))


def _unless_mixed(
    read: Callable[[], Any], write: Callable[[Any], Any]
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A switch that torch refuses to read, once what it comprises was set one by one: it is left alone then."""

    def known() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    def restore(value: Any) -> None:
        if value is not None:
            write(value)

    return known, restore


def _set_parts(write: Callable[..., Any], value: Any) -> None:
    """Sets a switch that has one part or several."""
    write(*(value if isinstance(value, tuple) else (value,)))


# -- where in autograd's graph a traced step is --------------------------------------------------------------


def next_sequence_number(unknown: int = 0) -> int:
    """The number that autograd's next function will get; `unknown` where torch does not say."""
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return int(number()) if number is not None else unknown


def history_mark() -> int:
    """For `is_made_since`: now."""
    return next_sequence_number(unknown=2**63)


def is_made_since(tensor: torch.Tensor, mark: int) -> bool:
    """Whether one of autograd's functions that ran after a mark made it; False where torch does not say."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= mark


def ran_since(node: Any, mark: int) -> bool:
    """Whether one of autograd's functions ran after a mark; True where torch does not say when."""
    return mark >= 2**63 or bool(node._sequence_nr() >= mark)


def is_end_of_graph(node: Any) -> bool:
    """Whether what stands there among autograd's functions only adds to the gradient of a leaf."""
    return hasattr(node, "variable")


def is_made_earlier(tensor: torch.Tensor) -> bool:
    """While autograd saves a tensor: whether it surely comes from another function than the one that saves it.

    That one has the latest number. Functions written in Python or in extensions may have run others in between.
    """
    made_by = tensor.grad_fn
    if made_by is None:
        return True
    is_torchs = hasattr(getattr(torch._C, "_functions", None), type(made_by).__name__)
    return is_torchs and made_by._sequence_nr() < next_sequence_number() - 1


def backward_sequence_number() -> int:
    """The number of the function whose backward runs now; -1 where there is none, or torch does not say."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if current is not None else None
    return int(node._sequence_nr()) if node is not None else -1


#: Operators called inside are not recorded for a backward, at no cost; parameters stay what they are to them.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)


# -- torch.compile's own memory budget -----------------------------------------------------------------------


MANY_GRAPHS = 256  # of one function; torch gives up after a few, and then runs it as it is


@contextlib.contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """Graphs that are compiled within keep no more than this share of what the partitioner would keep."""
    from torch._dynamo import config as compiling
    from torch._functorch import config as partitioning

    limit = "recompile_limit" if hasattr(compiling, "recompile_limit") else "cache_size_limit"
    with partitioning.patch(activation_memory_budget=share), compiling.patch({limit: MANY_GRAPHS}):
        yield


def own_backend(name: str) -> Callable[..., Any]:
    """A backend of torch.compile under an identity of its own, so that what it compiled is not taken for another's."""

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(name)(graph, inputs, **options)

    return compile_graph
