"""The base of problems and schedules: each is an object of the C library, with a hash and a file format."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, Union

from ._errors import BadInput, Error
from ._library import Handle, lib

FILE_BYTES_MAX = 2**30

#: A file: a path as text or as an os.PathLike.
FilePath = Union[str, "os.PathLike[str]"]

D = TypeVar("D", bound="Document")


class Document:
    """Immutable, and equal to another one when their hashes are. A copy is the same object."""

    __slots__ = ("__weakref__", "_handle", "_views")
    _handle: Handle
    _views: dict[str, Any]
    _writer: ClassVar[str]  # the library's function that writes its text

    def _own(self, handle: Handle) -> None:
        self._handle = handle
        self._views = {}

    @property
    def pointer(self) -> Any:
        """The object in C, for callers of other C functions; valid as long as this one."""
        return self._handle.pointer

    @property
    def hash(self) -> str:
        """Hash of what counts: "sha256:" and 64 hexadecimal digits."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The text of its file."""
        with self._written() as (text, length):
            return ctypes.string_at(text, length).decode()

    def __eq__(self, other: object) -> bool:
        return self.hash == other.hash if isinstance(other, Document) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def __copy__(self: D) -> D:
        return self

    def __deepcopy__(self: D, memo: dict[int, Any]) -> D:
        return self

    def save(self, path: FilePath) -> None:
        """Writes it to a file: whole, to a temporary name beside it, then renamed.

        Raises
        ------
        Io
            The file cannot be written.
        """
        name = file_name(path)
        with self._written() as (text, length), naming(path):
            lib.check(lib.cairn_file_write, name, text, length)

    @contextlib.contextmanager
    def _written(self) -> Iterator[tuple[Any, int]]:
        """The text where the library wrote it, not copied; freed at the end."""
        text = ctypes.POINTER(ctypes.c_char)()
        length = ctypes.c_size_t()
        lib.check(getattr(lib, self._writer), None, self.pointer, ctypes.byref(text), ctypes.byref(length))
        try:
            yield text, length.value
        finally:
            lib.cairn_text_free(None, text, length)


@contextlib.contextmanager
def naming(path: FilePath) -> Iterator[None]:
    """Errors within have the file's name."""
    try:
        yield
    except Error as error:
        error.file = os.fsdecode(path)
        raise


def file_read(path: FilePath) -> bytes:
    """A file's bytes; one more than the library's limit where it is larger, which the library then refuses."""
    with open(os.fspath(path), "rb") as file:  # an int would be somebody's open file
        return file.read(FILE_BYTES_MAX + 1)


def loaded(path: FilePath, read: Callable[[bytes], D]) -> D:
    """What `read` makes of the text of a file. Its errors have the file's name."""
    with naming(path):
        return read(file_read(path))


def file_write(path: FilePath, text: str) -> None:
    """Writes a file whole, by the library."""
    name, data = file_name(path), text.encode()
    with naming(path):
        lib.check(lib.cairn_file_write, name, data, len(data))


def file_name(path: FilePath) -> bytes:
    """The name of a file to write, as the library takes it."""
    name = os.fsencode(path)
    if not name or b"\0" in name:
        raise BadInput(f"the name of a file to write {'contains a zero byte' if name else 'is empty'}")
    return name
