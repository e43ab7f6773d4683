"""Programs run as scripts in processes of their own, which all begin where torch and its like are imported already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PRELOADED = ["torch", "transformers", "cairn.torch"]


def run_script(path: Path, *arguments: str, folder: Path, timeout: int) -> subprocess.CompletedProcess[str]:
    """Run a script that imports torch, for which importing it again in each process would take most of its time.

    Parameters
    ----------
    path
        The script.
    arguments
        What its command line says.
    folder
        Where the script runs; its output is kept beside it.
    timeout
        Seconds after which it is killed, and `subprocess.TimeoutExpired` raised.

    Returns
    -------
    subprocess.CompletedProcess
        Its exit status, and what it wrote.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if find_spec(name.split(".")[0])])
    written = folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")
    process = context.Process(target=_as_main, args=(str(path), arguments, str(folder), *map(str, written)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired([str(path), *arguments], timeout, *(file.read_text() for file in written))
    return subprocess.CompletedProcess(
        [str(path), *arguments], process.exitcode, *(file.read_text() for file in written)
    )


def _as_main(path: str, arguments: tuple[str, ...], folder: str, out: str, err: str) -> None:
    for stream, name in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    os.chdir(folder)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
