"""The command line as programs see it: arguments in; exit code, standard output, standard error and files out."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("CAIRN_BUILD_DIR", ROOT / "build" / "release"))
PROGRAM = Path(os.environ.get("CAIRN_BIN", BUILD / "bin" / "cairn"))

# The examples of docs/reference/formats/, whose hashes are part of the format.
CHAIN = {
    "format": "cairn-chain", "version": 1, "name": "gpt2 b4 s256",
    "provenance": {"model": "gpt2", "device": "cpu", "torch": "2.13.0"},
    "fixed_bytes": 0, "input_bytes": 4096, "input_grad_bytes": 4096,
    "stages": [
        {"name": "h.0", "output_bytes": 4096, "grad_bytes": 4096, "weight_grad_bytes": 8192, "no_recompute": False,
         "forward_only_ns": 950, "forward_only_workspace_bytes": 32768,
         "saved_bytes": 65536, "forward_ns": 1000, "backward_ns": 2000,
         "forward_workspace_bytes": 0, "backward_workspace_bytes": 0},
        {"name": "h.1", "output_bytes": 4096,
         "options": [
             {"name": "keep", "saved_bytes": 65536, "forward_ns": 1000, "backward_ns": 2000},
             {"name": "selective", "saved_bytes": 20480, "forward_ns": 1000, "backward_ns": 2600,
              "backward_workspace_bytes": 45056}]}],
    "machine": {"host_bytes": 1073741824, "to_host_bytes_per_s": 12000000000, "to_device_bytes_per_s": 12000000000,
                "shared_link": False, "latency_ns": 10000},
}  # fmt: skip
CHAIN_HASH = "sha256:3fc20707407bba8b911106c7c1abda2207969a355c30f0b5666fd6c7e519f6b2"
GRAPH = {
    "format": "cairn-graph", "version": 1, "name": "resnet50 b184", "provenance": {}, "fixed_bytes": 0,
    "nodes": [
        {"name": "conv1", "cost_ns": 1000, "bytes": 65536, "workspace_bytes": 0, "deps": [],
         "alias_of": None, "keep": False, "no_recompute": False},
        {"name": "relu1", "cost_ns": 100, "bytes": 65536, "deps": [0]}],
    "backward_begins_at": 1,
}  # fmt: skip
GRAPH_HASH = "sha256:173b6aa0575166c951a0ae7fee59ab5781050e7be4cb324f98c551c8e77194f2"

STORE_ALL_CHAIN = [["forward_save", 1, 0], ["forward_save", 2, 0], ["backward", 2], ["backward", 1]]


def stage(size: int = 10, saved: int | None = None, time: int = 5, **more: object) -> dict:
    saved = 2 * size if saved is None else saved
    return {"output_bytes": size, "saved_bytes": saved, "forward_ns": time, "backward_ns": 2 * time, **more}


def chain(*stages: dict, **more: object) -> dict:
    return {"format": "cairn-chain", "version": 1, "input_bytes": 10, "stages": list(stages), **more}


def schedule_of(hash_: str, ops: list, kind: str = "cairn-chain", **more: object) -> dict:
    return {"format": "cairn-schedule", "version": 1, "problem": {"format": kind, "hash": hash_}, "ops": ops, **more}


class Cairn:
    """Runs the program in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, content: object) -> str:
        path = self.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return name

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def __call__(self, *words: object, text: str | bytes = b"", **more: object) -> SimpleNamespace:
        data = text.encode() if isinstance(text, str) else text
        done = subprocess.run([PROGRAM, *map(os.fsencode, map(str, words))], cwd=self.folder, input=data,
                              capture_output=True, timeout=60, check=False, **more)  # fmt: skip
        assert done.returncode >= 0, f"killed by signal {-done.returncode}: {done.stderr.decode(errors='replace')}"
        assert b"Sanitizer" not in done.stderr, done.stderr.decode(errors="replace")
        return SimpleNamespace(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())

    def json(self, *words: object, code: int = 0, **more: object) -> dict:
        done = self(*words, "--json", **more)
        assert done.code == code, done.err
        assert done.out.count("\n") == 1
        return json.loads(done.out)
