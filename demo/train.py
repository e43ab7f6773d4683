"""Trains one of the demo's networks in a process of its own, optionally capped by the operating system.

    python demo/train.py WORKLOAD STRATEGY [--steps N] [--room MIB]

WORKLOAD is cnn or gpt; STRATEGY is plain, blocks (torch's checkpoint around every block) or cairn. With --room the
kernel lets the process take that many MiB beyond what it uses once the network is built (RLIMIT_DATA): an allocation
that goes beyond fails. Prints the losses, exactly, as JSON on its last line; exits with 3 when memory ran out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from workloads import WORKLOADS, Workload

OUT_OF_MEMORY = 3
MIB = 1024 * 1024
M_MMAP_THRESHOLD = -3  # of mallopt(3): from this size on, freed memory goes back to the system at once


def status_bytes(field: str) -> int:
    """A size from the kernel's table of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def cap(room_mib: int) -> None:
    """Lets the process take so much more memory, and no more."""
    limit = status_bytes("VmData") + room_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def checkpoint_blocks(workload: Workload) -> None:
    """Recomputes every block: what people do to be safe."""
    for block in workload.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: torch_checkpoint(plain, x, use_reentrant=False)


def plan_with_cairn(workload: Workload, sample: tuple[Any, Any], **options: Any) -> None:
    """The three lines that this is about: budget="auto" is what the system leaves to this process."""
    import cairn.torch

    x, y = sample
    cairn.torch.checkpoint(
        workload.model,
        (x,),
        budget="auto",
        loss_fn=lambda output: workload.loss(output, y),
        optimizer=workload.optimizer,
        check_steps=0,
        **options,
    )


def train(workload: Workload, steps: int) -> dict[str, Any]:
    """Losses as hexadecimal floats, so that they can be compared bit for bit, and seconds per step."""
    losses, seconds = [], []
    for _ in range(steps):
        x, y = next(workload.batches)
        began = time.perf_counter()
        loss = workload.loss(workload.model(x), y)
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        seconds.append(time.perf_counter() - began)
    return {"losses": losses, "seconds": seconds, "peak_mib": status_bytes("VmHWM") // MIB}


def main() -> int:
    """Runs one training as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("strategy", choices=["plain", "blocks", "cairn", "offload"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--room", type=int, metavar="MIB")
    arguments = parser.parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    torch.set_num_threads(1)
    workload = WORKLOADS[arguments.workload]()
    sample = next(WORKLOADS[arguments.workload]().batches)
    if arguments.strategy in ("cairn", "offload"):
        import cairn.torch  # what importing takes is not the step's  # noqa: F401
    if arguments.room:
        cap(arguments.room)
    try:
        if arguments.strategy == "blocks":
            checkpoint_blocks(workload)
        elif arguments.strategy == "cairn":
            plan_with_cairn(workload, sample)
        elif arguments.strategy == "offload":
            folder = tempfile.gettempdir()
            plan_with_cairn(workload, sample, host_budget="1GiB", tier=f"file:{folder}", inside=False)
        print(json.dumps(train(workload, arguments.steps)))
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        print(json.dumps({"out_of_memory": str(error).split(" Error code")[0].splitlines()[0]}))
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
