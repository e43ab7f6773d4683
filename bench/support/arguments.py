"""The command line that all benchmarks share: their own options, and --quick, which is a run of seconds."""

from __future__ import annotations

import argparse
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints a benchmark's docstring as it stands.

    Parameters
    ----------
    description
        The docstring of the benchmark.
    """
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(arguments: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the command line after adding --quick.

    Parameters
    ----------
    arguments
        A parser with the options of the benchmark.
    quick
        Defaults that hold with --quick, by the names of options. Options given beside --quick override them.

    Returns
    -------
    argparse.Namespace
        The options; `quick` says whether the run is to be short.
    """
    unknown = quick.keys() - {action.dest for action in arguments._actions}
    if unknown:
        raise TypeError(f"--quick sets {sorted(unknown)}, which are no options of this benchmark")
    arguments.add_argument("--quick", action="store_true", help="a run of seconds that shows that the benchmark works")
    if arguments.parse_known_args()[0].quick:
        arguments.set_defaults(**quick)
    return arguments.parse_args()
