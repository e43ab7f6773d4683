"""The console script: runs the command line that belongs to the library."""

from __future__ import annotations

import os
import sys

from ._library import native_folder


def main() -> None:
    """Becomes the native `cairn` program, with the same arguments and exit status."""
    folder = native_folder("bin")
    program = None if folder is None else folder / "cairn"
    if program is None or not program.is_file():
        sys.exit("cairn: this installation has no command line (it was built with CAIRN_CLI=OFF)")
    os.execv(program, ["cairn", *sys.argv[1:]])
