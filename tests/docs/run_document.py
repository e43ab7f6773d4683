"""Runs the examples of Markdown documents, each document in a folder of its own: run_document.py DOCUMENT...

All documents share one interpreter, so that torch is imported, and measured by cairn.torch, only once. A document that
fails does not stop the others.

Fenced blocks of these kinds are examples, and are run; all others are text:
  python   each block sees what those before it in the document defined
  sh       by bash, with `cairn` and the project's Python on the path; a command that fails fails the block
  c        a whole program: compiled against the built library, without warnings, and run
A block inside an HTML comment is run too: what an example needs but a reader does not. A block that cannot be run here
(it installs things, say) stands below a line "<!-- not run: REASON -->".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^(?P<fence>```+)(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^>]{3,} -->\s*\Z")
KINDS = ("python", "sh", "c")


@dataclass
class Block:
    """One fenced block and the line of its first line of text."""

    kind: str
    line: int
    text: str


def blocks_of(document: str) -> Iterator[Block]:
    """The blocks of a document that are to be run."""
    for match in BLOCK.finditer(document):
        if match["kind"] in KINDS and not NOT_RUN.search(document, 0, match.start()):
            yield Block(match["kind"], document.count("\n", 0, match.start("text")) + 1, match["text"])


def run_python(block: Block, path: Path, namespace: dict[str, object]) -> None:
    source = "\n" * (block.line - 1) + block.text  # tracebacks then show the document's lines
    exec(compile(source, str(path), "exec"), namespace)


def run_sh(block: Block) -> None:
    subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


def run_c(block: Block, number: int, build: Path) -> None:
    source, program = Path(f"example_{number}.c"), Path(f"example_{number}").resolve()
    source.write_text(block.text)
    include = Path(__file__).parents[2] / "include"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{include}", source, "-o", program,
         f"-L{build / 'lib'}", "-lcairn", f"-Wl,-rpath,{build / 'lib'}"],
        check=True,
    )  # fmt: skip
    subprocess.run([program], check=True)


def run(path: Path, build: Path) -> None:
    """Runs all blocks of one document; an exception or a failing command ends it."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks_of(path.read_text(encoding="utf-8"))):
        start = time.monotonic()
        print(f"-- {path.name}:{block.line}: {block.kind}", flush=True)
        if block.kind == "python":
            run_python(block, path, namespace)
        elif block.kind == "sh":
            run_sh(block)
        else:
            run_c(block, number, build)
        print(f"   {time.monotonic() - start:.1f} s", flush=True)


def main(paths: list[Path]) -> int:
    """Runs all documents; 1 if one fails."""
    build, start, failed = Path(os.environ["CAIRN_BUILD_DIR"]).resolve(), Path.cwd(), 0
    for number, path in enumerate(paths):
        folder = start / f"{number}-{path.stem}"
        folder.mkdir()
        os.chdir(folder)
        try:
            run(path, build)
        except Exception:
            failed = 1
            traceback.print_exc()
            print(f"-- {path} FAILED", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main([Path(each).resolve() for each in sys.argv[1:]]))
