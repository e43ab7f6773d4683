"""The overhead of a compiled block beyond its operators: microseconds for each block and step, forward and backward.

A block of tiny tensors, whose operators take next to no time, runs forward and backward in four ways: not compiled;
captured by Dynamo alone, without AOTAutograd, which shows what guards take; compiled by torch alone (AOTAutograd,
operator by operator); and compiled by `ct.compile(regions=True)` with everything kept. All take turns; times are CPU
times, and a row is the median over the rounds. The last lines share out the time of the compiled block: the code of its
two graphs, called directly; the functions of Cairn that it calls; the rest, which is torch's.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cairn.torch as ct
import torch
from support import arguments
from support.region_models import Attending as Block
from support.training import machine, quiet, write
from torch import nn
from torch._dynamo.backends.common import aot_autograd


class Codes:
    """The code of compiled graphs, and what each was called with last."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[Callable[..., Any], list[Any]]] = {}

    def compiler(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        """The code of a graph, which remembers its inputs."""

        def run(args: list[Any]) -> Any:
            self.calls[id(run)] = module.forward, list(args)
            return module.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined] # AOTAutograd's mark
        return run

    def seconds(self) -> float:
        """CPU time of the two graphs of a block, called directly: the mean over all blocks."""
        began = time.process_time()
        with torch.no_grad():
            for function, args in self.calls.values():
                function(*args)
        return (time.process_time() - began) * 2 / len(self.calls)


def seconds(block: Callable[..., Any], x: torch.Tensor, count: int) -> float:
    """CPU time of a forward and backward, the mean of some."""
    began = time.process_time()
    for _ in range(count):
        block(x).sum().backward()
    return (time.process_time() - began) / count


def planned(blocks: nn.Sequential, x: torch.Tensor) -> nn.Module:
    """Compiled block by block, with everything kept."""
    named = [f"{index}" for index in range(len(blocks))]
    options: dict[str, Any] = {"kernels": "eager", "regions": named, "prove": False, "progress": False}
    return ct.compile(blocks, x, budget="1TiB", loss_fn=torch.sum, **options)


def own_calls(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """The functions of Cairn that one step calls, and how often."""
    profile = cProfile.Profile()
    with profile:
        model(x).sum().backward()
    entries: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined] # of all versions
    return {name: entry[0] for (file, _, name), entry in entries.items() if "/cairn/torch/" in file}


def main() -> None:
    """Measure and print; write JSON where a file is named."""
    command = arguments.parser(__doc__)
    command.add_argument("--blocks", type=int, default=4)
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--count", type=int, default=20, help="steps of a round")
    command.add_argument("--json", type=Path)
    options = arguments.parse(command, blocks=2, rounds=2, count=2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(1, 4, 64, requires_grad=True)
    with quiet():
        blocks = nn.Sequential(*(Block(64) for _ in range(options.blocks)))
        twin = nn.Sequential(*(Block(64) for _ in range(options.blocks)))
        codes = Codes()
        for block in twin:
            block.compile(backend=aot_autograd(fw_compiler=codes.compiler), fullgraph=True, dynamic=False)
        captured = nn.Sequential(*(Block(64) for _ in range(options.blocks)))
        for block in captured:
            block.compile(backend="eager", fullgraph=True, dynamic=False)
        kept = planned(nn.Sequential(*(Block(64) for _ in range(options.blocks))), x)
        runs: dict[str, nn.Module] = {"not compiled": blocks, "captured by Dynamo": captured, "compiled by torch": twin}
        runs["compiled with a plan"] = kept
        taken: dict[str, list[float]] = {name: [] for name in (*runs, "code of its graphs")}
        for number in range(options.rounds + 1):
            for name, model in runs.items():
                found = seconds(model, x, options.count)
                if number:
                    taken[name].append(found)
            taken["code of its graphs"].append(codes.seconds() * options.blocks)
        rows = [{"way": name, "us": 1e6 * statistics.median(each) / options.blocks} for name, each in taken.items()]
        for row in rows:
            print(f"{row['way']:22} {row['us']:8.0f} us for each block")
        print("functions of Cairn in a step:", own_calls(kept, x))
        write(options.json, {"conditions": machine(), "rows": rows})


if __name__ == "__main__":
    main()
