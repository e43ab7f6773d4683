"""Finds, loads and calls the C library.

The prototypes are C text, so that python/tests/test_abi.py can let a C compiler compare them with the headers.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from . import _structs
from ._errors import BY_CODE, Error, Internal, Unavailable
from ._version import __version__

PROTOTYPES = """
const char *cairn_status_name(cairn_status);
const char *cairn_version(void);
void cairn_bits_pack(const void *, int, int64_t, void *);
void cairn_bits_unpack(const void *, int64_t, const void *, int, void *);
bool cairn_words_hold(const uint64_t *const *, const uint64_t *, int64_t);

cairn_status cairn_problem_new_chain(const cairn_env *, const cairn_chain *, const cairn_problem_info *,
                                     cairn_problem **, cairn_error *);
cairn_status cairn_problem_new_graph(const cairn_env *, const cairn_graph *, const cairn_problem_info *,
                                     cairn_problem **, cairn_error *);
void cairn_problem_free(cairn_problem *);
cairn_problem_kind cairn_problem_kind_of(const cairn_problem *);
const cairn_chain *cairn_problem_chain(const cairn_problem *);
const cairn_graph *cairn_problem_graph(const cairn_problem *);
const cairn_problem_info *cairn_problem_info_of(const cairn_problem *);
const char *cairn_problem_hash(const cairn_problem *);
cairn_status cairn_chain_to_graph(const cairn_env *, const cairn_problem *, cairn_problem **, cairn_error *);
cairn_status cairn_problem_scale(const cairn_env *, const cairn_problem *, int64_t, int64_t, cairn_problem **,
                                 cairn_error *);
int64_t cairn_transfer_ns(int64_t, int64_t, int64_t);

const char *cairn_op_name(cairn_op_code);
cairn_status cairn_builder_new(const cairn_env *, const cairn_problem *, cairn_builder **, cairn_error *);
cairn_status cairn_builder_add(cairn_builder *, cairn_op, cairn_error *);
cairn_status cairn_builder_finish(cairn_builder *, const cairn_schedule_info *, cairn_schedule **, cairn_error *);
void cairn_builder_free(cairn_builder *);
void cairn_schedule_free(cairn_schedule *);
int64_t cairn_schedule_count(const cairn_schedule *);
const cairn_op *cairn_schedule_ops(const cairn_schedule *);
const cairn_schedule_info *cairn_schedule_info_of(const cairn_schedule *);
const char *cairn_schedule_problem_hash(const cairn_schedule *);
const char *cairn_schedule_hash(const cairn_schedule *);
const char *cairn_violation_name(cairn_violation_code);
cairn_status cairn_simulate(const cairn_env *, const cairn_problem *, const cairn_schedule *, int64_t,
                            const cairn_observer *, cairn_replay *, cairn_error *);
cairn_status cairn_verify(const cairn_env *, const cairn_problem *, const cairn_schedule *, int64_t,
                          cairn_verified **, cairn_replay *, cairn_error *);
void cairn_verified_free(cairn_verified *);

const char *cairn_outcome_name(cairn_outcome);
const cairn_option_info *cairn_option_at(int);
cairn_status cairn_options_new(const cairn_env *, cairn_options **, cairn_error *);
void cairn_options_free(cairn_options *);
cairn_status cairn_options_set(cairn_options *, const char *, const char *, cairn_error *);
cairn_status cairn_options_set_int(cairn_options *, const char *, int64_t, cairn_error *);
cairn_status cairn_parse_size(const char *, int64_t *, cairn_error *);
cairn_status cairn_parse_rate(const char *, int64_t *, cairn_error *);
cairn_status cairn_parse_duration(const char *, int64_t *, cairn_error *);
const cairn_solver_info *cairn_solver_at(int);
bool cairn_solver_has_option(const char *, const char *);
cairn_status cairn_solver_accepts(const char *, const cairn_problem *, const cairn_options *, cairn_error *);
void cairn_info_clear(cairn_info *);
cairn_status cairn_solve(const cairn_env *, const cairn_problem *, const cairn_options *, cairn_schedule **,
                         cairn_info *, cairn_error *);
cairn_status cairn_solve_many(const cairn_env *, const cairn_problem *, const cairn_options *, const int64_t *, int,
                              cairn_schedule **, cairn_info *, cairn_error *);
cairn_status cairn_limits_of(const cairn_env *, const cairn_problem *, const cairn_options *, cairn_limits *,
                             cairn_error *);
cairn_status cairn_max_batch_of(const cairn_env *, const cairn_problem *, const cairn_options *, int64_t,
                                cairn_max_batch *, cairn_error *);
cairn_status cairn_bound_of(const cairn_env *, const cairn_problem *, const cairn_options *, cairn_bound *,
                            cairn_error *);

cairn_status cairn_problem_read(const cairn_env *, const char *, size_t, cairn_problem **, cairn_error *);
cairn_status cairn_schedule_read(const cairn_env *, const cairn_problem *, const char *, size_t, cairn_schedule **,
                                 cairn_error *);
cairn_status cairn_problem_write(const cairn_env *, const cairn_problem *, char **, size_t *, cairn_error *);
cairn_status cairn_schedule_write(const cairn_env *, const cairn_schedule *, char **, size_t *, cairn_error *);
void cairn_text_free(const cairn_env *, char *, size_t);
cairn_status cairn_file_write(const char *, const char *, size_t, cairn_error *);

cairn_status cairn_report_trace(const cairn_env *, const cairn_problem *, const cairn_schedule *, int64_t,
                                cairn_sink, cairn_error *);
cairn_status cairn_report_answer(const cairn_env *, const cairn_problem *, const cairn_schedule *,
                                 const cairn_info *, cairn_sink, cairn_error *);
cairn_status cairn_report_comparison(const cairn_env *, const cairn_info *, int, cairn_sink, cairn_error *);
cairn_status cairn_report_csv(const cairn_env *, const cairn_info *, int, cairn_sink, cairn_error *);
const char *cairn_format_bytes(int64_t, char *, size_t);
const char *cairn_format_ns(int64_t, char *, size_t);
const char *cairn_format_budget(int64_t, char *, size_t);
"""

_SCALARS: dict[str, Any] = {
    "void": None,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    **dict.fromkeys(_structs.ENUMS, ctypes.c_int),
    **_structs.STRUCTS,
    **_structs.OPAQUE,
}


def _ctype(declaration: str) -> Any:
    """The ctypes type of "const cairn_problem *" and the like."""
    stars = declaration.count("*")
    base = declaration.replace("const", " ").replace("*", " ").strip()
    if base == "char" and stars == 1:
        return ctypes.c_char_p
    kind = ctypes.c_char if base == "char" else _SCALARS[base]
    for _ in range(stars):
        kind = ctypes.POINTER(kind)
    return kind


def _prototypes() -> dict[str, tuple[Any, list[Any]]]:
    table = {}
    for line in " ".join(PROTOTYPES.split()).split(";")[:-1]:
        head, _, arguments = line.partition("(")
        name = head.replace("*", " ").split()[-1]
        result = head[: head.rindex(name)]
        kinds = [_ctype(part) for part in arguments.rstrip(")").split(",")]
        table[name] = (_ctype(result), [] if kinds == [None] else kinds)
    return table


def _native_folders() -> list[Path]:
    """Folders that may hold include, lib and bin: the installed package's, then the build tree's."""
    package = Path(__file__).resolve().parent
    repository = package.parent.parent
    return [package / "_native", repository / "build" / "release"]


def _candidates() -> list[Path]:
    override = os.environ.get("CAIRN_LIBRARY")
    if override:
        return [Path(override)]
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return [folder / "lib" / f"libcairn.{suffix}" for folder in _native_folders()]


def _find_highs() -> None:
    """Names HiGHS, when it comes with the package highsbox, to the C library, which reads the environment.

    What the user has set stays.
    """
    spec = importlib.util.find_spec("highsbox")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "highs_dist" / "lib" / ("libhighs.dylib" if sys.platform == "darwin" else "libhighs.so")
        if path.exists():
            os.environ.setdefault("CAIRN_HIGHS_LIBRARY", str(path))


def _open() -> tuple[ctypes.CDLL, Path]:
    candidates = _candidates()
    for path in candidates:
        if path.exists():
            try:
                return ctypes.CDLL(str(path)), path
            except OSError as error:
                raise ImportError(f"cairn: cannot load the C library {path}: {error}") from error
    looked = "\n  ".join(str(path) for path in candidates)
    hint = (
        "CAIRN_LIBRARY names a file that does not exist: unset it, or let it name libcairn.so"
        if os.environ.get("CAIRN_LIBRARY")
        else "install the package (pip install .), build the tree (make build), or set CAIRN_LIBRARY"
    )
    raise ImportError(f"cairn: the C library was not found; looked for\n  {looked}\n{hint}")


def _missing(name: str, path: Path) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise Unavailable(f"{path} has no {name}: it was built without files (CAIRN_IO=OFF)")

    return function


class Library:
    """The loaded C library: its functions as attributes, with their prototypes set.

    Calls release the interpreter lock for as long as they take.
    """

    def __init__(self) -> None:
        handle, self.path = _open()
        version = self._version_of(handle)
        if version != __version__:
            raise ImportError(
                f"cairn: the Python package is version {__version__}, the C library {self.path} is version {version}; "
                "they must be the same: install the package again, or unset CAIRN_LIBRARY if it is set"
            )
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _prototypes().items():
            try:
                function = getattr(handle, name)
            except AttributeError:
                self._functions[name] = _missing(name, self.path)
                continue
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self._statuses = self._names(self.cairn_status_name)

    def with_lock_held(self, name: str) -> Callable[..., Any]:
        """A function for calls that keep the interpreter lock, with ctypes objects as arguments: the result's type is
        set.
        """
        function = getattr(ctypes.PyDLL(str(self.path)), name)
        function.restype = _prototypes()[name][0]
        return cast("Callable[..., Any]", function)

    def _version_of(self, handle: ctypes.CDLL) -> str:
        try:
            function = handle.cairn_version
        except AttributeError:
            raise ImportError(f"cairn: {self.path} is not Cairn's C library") from None
        function.restype, function.argtypes = ctypes.c_char_p, []
        version: bytes = function()
        return version.decode()

    def _names(self, function: Callable[[int], bytes]) -> list[str]:
        names: list[str] = []
        while (name := function(len(names)).decode()) != "unknown":
            names.append(name)
        return names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def status_names(self) -> tuple[str, ...]:
        """Names of all statuses of the C library, in its order."""
        return tuple(self._statuses)

    def error_of(self, status: int, error: _structs.Error) -> Error:
        """The exception for a failed call."""
        name = self._statuses[status] if 0 < status < len(self._statuses) else "internal"
        made = BY_CODE.get(name, Internal)(error.message.decode(errors="replace") or name)
        for field in ("line", "column", "offset", "index"):
            value = getattr(error, field)
            setattr(made, field, None if value == _structs.NONE else value)
        made.path = error.path.decode(errors="replace") or None
        return made

    def check(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls a function that returns a status and takes a cairn_error last; raises what it reports."""
        error = _structs.Error(line=-1, column=-1, offset=-1, index=-1)
        status = function(*arguments, ctypes.byref(error))
        if status != 0:
            raise self.error_of(status, error)


class Handle:
    """Owns an object of the C library and frees it with the last reference."""

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: Any, free: Callable[[Any], None]) -> None:
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        self._free(self.pointer)


_find_highs()
lib = Library()


def native_folder(name: str) -> Path | None:
    """Folder "include", "lib" or "bin" of the installation or the build tree that the library came from."""
    if name == "include" and not (lib.path.parent.parent / name).is_dir():
        repository = Path(__file__).resolve().parent.parent.parent / name
        return repository if (repository / "cairn").is_dir() else None
    folder = lib.path.parent.parent / name
    return folder if folder.is_dir() else None


def get_include() -> str:
    """Folder with the C headers: ``#include <cairn/cairn.h>`` works with ``-I`` this folder.

    Returns
    -------
    str
        The folder.
    """
    folder = native_folder("include")
    if folder is None:
        raise Unavailable(f"the C headers are not beside the library {lib.path}")
    return str(folder)


def get_library() -> str:
    """Path of the C library that is loaded.

    Returns
    -------
    str
        The file.
    """
    return str(lib.path)


def text_of(value: bytes | None) -> str:
    """Text of a const char * (NULL is empty)."""
    return "" if value is None else value.decode(errors="replace")


def number_of(value: int) -> int | None:
    """A number of the C library, None for CAIRN_NONE."""
    return None if value == _structs.NONE else value
