"""Cairn: which activations to keep, recompute or send to host memory, so that a training step fits a byte budget.

A problem (``Chain`` or ``Graph``) and a budget go into ``solve``; a ``Schedule`` comes out, an immutable list of
operations; ``simulate`` and ``verify`` judge it. Sizes are in bytes, times in nanoseconds. Problems and schedules are
immutable and may be shared between threads.

PyTorch models are the business of ``cairn.torch``, which is imported by name; this part needs neither torch nor numpy.
"""

from ._bounds import Bound, Limits, MaxBatch, bound, limits, max_batch
from ._budget import Budget
from ._calls import Progress, ProgressCallback
from ._compare import Comparison, compare
from ._errors import (
    BadArgument,
    BadInput,
    Callback,
    Cancelled,
    Error,
    InfeasibleBudget,
    Internal,
    InvalidSchedule,
    Io,
    MemoryLimit,
    Mismatch,
    NoMemory,
    NoSchedule,
    Overflow,
    Parse,
    TooLarge,
    Unavailable,
    Unsupported,
)
from ._library import get_include, get_library
from ._machine import Machine
from ._node import Node
from ._ops import Op
from ._options import OptionInfo, options
from ._problem import Chain, Graph, Problem, load
from ._replay import MemoryPoint, Replay, Span, Violation
from ._report import save_trace, trace
from ._schedule import Schedule
from ._simulate import RECORDED, Verified, simulate, verify
from ._solution import Outcome, Solution
from ._solve import Acceptance, solve, solve_many, solver_accepts
from ._solvers import SolverInfo, solvers
from ._stage import Option, Stage
from ._units import Size, format_budget, format_bytes, format_ns, parse_duration, parse_rate, parse_size
from ._version import __version__

__all__ = [
    "RECORDED",
    "Acceptance",
    "BadArgument",
    "BadInput",
    "Bound",
    "Budget",
    "Callback",
    "Cancelled",
    "Chain",
    "Comparison",
    "Error",
    "Graph",
    "InfeasibleBudget",
    "Internal",
    "InvalidSchedule",
    "Io",
    "Limits",
    "Machine",
    "MaxBatch",
    "MemoryLimit",
    "MemoryPoint",
    "Mismatch",
    "NoMemory",
    "NoSchedule",
    "Node",
    "Op",
    "Option",
    "OptionInfo",
    "Outcome",
    "Overflow",
    "Parse",
    "Problem",
    "Progress",
    "ProgressCallback",
    "Replay",
    "Schedule",
    "Size",
    "Solution",
    "SolverInfo",
    "Span",
    "Stage",
    "TooLarge",
    "Unavailable",
    "Unsupported",
    "Verified",
    "Violation",
    "__version__",
    "bound",
    "compare",
    "format_budget",
    "format_bytes",
    "format_ns",
    "get_include",
    "get_library",
    "limits",
    "load",
    "max_batch",
    "options",
    "parse_duration",
    "parse_rate",
    "parse_size",
    "save_trace",
    "simulate",
    "solve",
    "solve_many",
    "solver_accepts",
    "solvers",
    "trace",
    "verify",
]
