"""Runs a function on two ranks of one process group (gloo, on the CPU), each in a process of its own."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

RANKS, SECONDS = 2, 400


def on_two_ranks(task: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on either rank; it and its arguments are pickled. An error of a rank is raised here."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, task, args, results)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        try:
            found = dict(results.get(timeout=SECONDS) for _ in ranks)
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
    failed = [value for value in found.values() if isinstance(value, _Failure)]
    if failed:
        raise RuntimeError(f"a rank failed: {failed[0]}")
    return [found[rank] for rank in range(RANKS)]


def local(tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class _Failure(str):
    """What a rank that failed says."""


def _rank(rank: int, folder: str, task: Callable[..., Any], args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=SECONDS)
    meeting = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=wait)
    try:
        found = task(*args)
    except BaseException as error:
        found = _Failure(repr(error))
    results.put((rank, found))
    results.close()
    results.join_thread()
    os._exit(0)  # a group that is freed may wait for threads of its own for ever
