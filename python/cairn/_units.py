"""Checked numbers, sizes, rates and durations."""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from ._budget import Budget
from ._errors import BadInput, Error, Overflow
from ._library import lib

#: Bytes: an int, or text such as "8GiB", "500MB" or "12000".
Size = int | str

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

T = TypeVar("T")


def integer(value: Any, field: str, path: str | None = None, least: int | None = None) -> int:
    """The value as an int that fits in 64 bits. field names it in the error, path says where it stands."""
    where = f"{path}: {field}" if path and path != field else field
    if isinstance(value, bool):
        raise TypeError(f"{where} must be an integer, not a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be an integer, not {type(value).__name__} {value!r}") from None
    if not -INT64_MAX <= number <= INT64_MAX:
        raise Overflow(f"{field} is {number}; at most 2^63 - 1", path=path)
    if least is not None and number < least:
        raise BadInput(f"{field} is {number}; at least {least}", path=path)
    return number


def flag(value: Any, field: str) -> bool:
    """The value as a bool, which it must be or equal."""
    with contextlib.suppress(ValueError):  # of arrays, which equal nothing as a whole
        if not isinstance(value, str) and value in (True, False):
            return bool(value)
    raise TypeError(f"{field} must be True or False, not {value!r}")


def listed(values: Iterable[Any], field: str, of: str) -> list[Any]:
    """The values as a list; text is not one."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a list of {of}, not {type(values).__name__}")
    return list(values)


def json_bytes(text: Any) -> bytes:
    """JSON text as bytes."""
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"JSON text must be str or bytes, not {type(text).__name__}")


def encoded(value: str, field: str) -> bytes:
    """The value as zero-terminated UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{field} must be text, not {type(value).__name__}")
    if "\0" in value:
        raise BadInput(f"{field} contains a zero byte")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{field} is not valid Unicode: {error.reason}") from None


def _parse(function: Any, text: str, field: str) -> int:
    result = ctypes.c_int64()
    try:
        lib.check(function, encoded(text, field), ctypes.byref(result))
    except Error as error:
        error.path = field
        raise
    return result.value


def size_bytes(size: Any, field: str) -> int:
    """Bytes of a size that was given as this argument."""
    if isinstance(size, str):
        return _parse(lib.cairn_parse_size, size, field)
    if isinstance(size, float):
        raise TypeError(f"{field} is an integer number of bytes, or text such as '8GiB'; not the float {size!r}")
    if isinstance(size, Budget):
        raise TypeError(f"{field} is an integer number of bytes, or text such as '8GiB'; cairn.torch takes a Budget")
    return integer(size, field, least=0)


def parse_size(size: Size) -> int:
    """Bytes of "8GiB", "1.5GB", "120B", "12000" or an int. KB to TB are powers of 1000; KiB to TiB of 1024.

    Parameters
    ----------
    size
        "8GiB" (powers of 1024), "8GB" (powers of 1000), or an integer.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    BadInput
        Not a size, or negative.
    TypeError
        Neither text nor an integer.
    """
    return size_bytes(size, "size")


def parse_rate(rate: int | str) -> int:
    """Bytes per second of "12GB/s" or an int.

    Parameters
    ----------
    rate
        A size followed by "/s", such as "12GB/s".

    Returns
    -------
    int
        Bytes per second.
    """
    if isinstance(rate, str):
        return _parse(lib.cairn_parse_rate, rate, "rate")
    return integer(rate, "rate", least=0)


def parse_duration(duration: int | str) -> int:
    """Nanoseconds of "500ms" (units ns, us, ms, s, m) or an int.

    Parameters
    ----------
    duration
        "500ms", with ns, us, ms, s or m.

    Returns
    -------
    int
        Nanoseconds.
    """
    if isinstance(duration, str):
        return _parse(lib.cairn_parse_duration, duration, "duration")
    return integer(duration, "duration", least=0)


def _format(function: Any, value: int) -> str:
    out = ctypes.create_string_buffer(64)
    function(value, out, len(out))
    return out.value.decode()


def unit_of(sizes: Iterable[int]) -> tuple[str, int]:
    """The unit for an axis on which these sizes lie, and its bytes: the largest that one of them reaches."""
    most = max(sizes, default=0)
    units = [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]
    return next((found for found in units if most >= found[1]), ("B", 1))


def format_bytes(count: int) -> str:
    """A size as text: "1.50 GiB".

    Parameters
    ----------
    count
        Bytes.

    Returns
    -------
    str
        Such as "1.50 GiB".
    """
    return _format(lib.cairn_format_bytes, integer(count, "count"))


def format_budget(count: int) -> str:
    """A sufficient budget as text, rounded up, so that the text read as a size is sufficient, too.

    Parameters
    ----------
    count
        Bytes.

    Returns
    -------
    str
        Text.
    """
    return _format(lib.cairn_format_budget, integer(count, "count"))


def format_ns(ns: int) -> str:
    """A time in nanoseconds as text: "12.3 ms".

    Parameters
    ----------
    ns
        Nanoseconds.

    Returns
    -------
    str
        Such as "1.50 ms".
    """
    return _format(lib.cairn_format_ns, integer(ns, "ns"))


def index32(value: Any, field: str, path: str) -> int:
    """The value as an index that fits in 32 bits."""
    number = integer(value, field, path, least=0)
    if number > INT32_MAX:
        raise BadInput(f"{field} is {number}, out of range: at most {INT32_MAX}", path=path)
    return number


def normalize(value: Any, **least: int | None) -> None:
    """Replaces the named fields of a frozen dataclass by checked ints."""
    for field, bound in least.items():
        object.__setattr__(value, field, integer(getattr(value, field), field, least=bound))


def list_of(values: Iterable[T], kind: type[T], field: str) -> list[T]:
    """The values as a list, all of one class of the package."""
    made = listed(values, field, f"cairn.{kind.__name__}")
    for i, value in enumerate(made):
        if not isinstance(value, kind):
            raise TypeError(f"{field}[{i}] must be a cairn.{kind.__name__}, not {type(value).__name__}")
    return made
