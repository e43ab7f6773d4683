"""The structures of include/cairn/*.h as ctypes sees them.

python/tests/test_abi.py compiles a C program that compares every size, offset and number of fields with the headers.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_void_p,
)
from typing import Any, ClassVar

ERROR_MESSAGE_MAX = 400
ERROR_PATH_MAX = 160
REASON_MAX = 240
NONE = -1  # CAIRN_NONE
RECORDED = -2  # CAIRN_RECORDED

KIND_CHAIN, KIND_GRAPH = 0, 1
VALUE_OUTPUT, VALUE_SAVED = 0, 1
(
    OPTION_SIZE,
    OPTION_RATE,
    OPTION_DURATION,
    OPTION_COUNT,
    OPTION_CHOICE,
    OPTION_TEXT,
    OPTION_FLAG,
) = range(7)


@functools.lru_cache(maxsize=256)
def array_type(kind: Any, count: int) -> Any:
    """Type of an array, cached: every ``kind * count`` makes a new class, which only the collector frees."""
    return kind * count


class Problem(Structure):
    """Opaque."""


class Schedule(Structure):
    """Opaque."""


class Builder(Structure):
    """Opaque."""


class Verified(Structure):
    """Opaque."""


class Options(Structure):
    """Opaque."""


class Error(Structure):
    _fields_: ClassVar = [
        ("status", c_int),
        ("line", c_int64),
        ("column", c_int64),
        ("offset", c_int64),
        ("index", c_int64),
        ("path", c_char * ERROR_PATH_MAX),
        ("message", c_char * ERROR_MESSAGE_MAX),
    ]


class Allocator(Structure):
    _fields_: ClassVar = [
        ("context", c_void_p),
        ("resize", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)),
    ]


class Progress(Structure):
    _fields_: ClassVar = [
        ("phase", c_char_p),
        ("done", c_int64),
        ("total", c_int64),
        ("best_ns", c_int64),
        ("lower_bound_ns", c_int64),
    ]


PollCallback = CFUNCTYPE(c_int, c_void_p, POINTER(Progress))
LogCallback = CFUNCTYPE(None, c_void_p, c_char_p)


class Env(Structure):
    _fields_: ClassVar = [
        ("allocator", Allocator),
        ("poll", PollCallback),
        ("poll_context", c_void_p),
        ("poll_interval_ns", c_int64),
        ("log", LogCallback),
        ("log_context", c_void_p),
    ]


class StageOption(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("saved_bytes", c_int64),
        ("forward_ns", c_int64),
        ("backward_ns", c_int64),
        ("forward_workspace_bytes", c_int64),
        ("backward_workspace_bytes", c_int64),
    ]


class Stage(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("output_bytes", c_int64),
        ("grad_bytes", c_int64),
        ("weight_grad_bytes", c_int64),
        ("forward_only_ns", c_int64),
        ("forward_only_workspace_bytes", c_int64),
        ("no_recompute", c_bool),
        ("option_count", c_int32),
        ("options", POINTER(StageOption)),
    ]


class Chain(Structure):
    _fields_: ClassVar = [
        ("input_bytes", c_int64),
        ("input_grad_bytes", c_int64),
        ("stage_count", c_int32),
        ("stages", POINTER(Stage)),
    ]


class Node(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("cost_ns", c_int64),
        ("bytes", c_int64),
        ("workspace_bytes", c_int64),
        ("deps", POINTER(c_int32)),
        ("dep_count", c_int32),
        ("alias_of", c_int32),
        ("keep", c_bool),
        ("no_recompute", c_bool),
    ]


class Graph(Structure):
    _fields_: ClassVar = [
        ("node_count", c_int32),
        ("nodes", POINTER(Node)),
        ("backward_begins_at", c_int32),
    ]


class Machine(Structure):
    _fields_: ClassVar = [
        ("host_bytes", c_int64),
        ("to_host_bytes_per_s", c_int64),
        ("to_device_bytes_per_s", c_int64),
        ("latency_ns", c_int64),
        ("shared_link", c_bool),
    ]


class ProblemInfo(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("provenance", c_char_p),
        ("fixed_bytes", c_int64),
        ("machine", POINTER(Machine)),
    ]


class Op(Structure):
    _fields_: ClassVar = [
        ("code", c_uint8),
        ("value", c_uint8),
        ("option", c_uint16),
        ("index", c_int32),
    ]


class ScheduleInfo(Structure):
    _fields_: ClassVar = [
        ("solver", c_char_p),
        ("budget_bytes", c_int64),
        ("makespan_ns", c_int64),
        ("peak_bytes", c_int64),
        ("lower_bound_ns", c_int64),
        ("machine", POINTER(Machine)),
    ]


class Violation(Structure):
    _fields_: ClassVar = [
        ("code", c_int),
        ("op", c_int64),
        ("needed_bytes", c_int64),
        ("free_bytes", c_int64),
        ("message", c_char * ERROR_MESSAGE_MAX),
    ]


class Replay(Structure):
    _fields_: ClassVar = [
        ("valid", c_bool),
        ("violation", Violation),
        ("makespan_ns", c_int64),
        ("peak_bytes", c_int64),
        ("host_peak_bytes", c_int64),
        ("compute_ns", c_int64),
        ("recompute_ns", c_int64),
        ("stall_ns", c_int64),
    ]


OpCallback = CFUNCTYPE(None, c_void_p, c_int64, Op, c_int, c_int64, c_int64)
MemoryCallback = CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_int64)


class Observer(Structure):
    _fields_: ClassVar = [
        ("context", c_void_p),
        ("op", OpCallback),
        ("memory", MemoryCallback),
    ]


class OptionInfo(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("type", c_int),
        ("min", c_int64),
        ("max", c_int64),
        ("choices", c_char_p),
        ("fallback", c_char_p),
        ("help", c_char_p),
    ]


class SolverInfo(Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("takes_chains", c_bool),
        ("takes_graphs", c_bool),
        ("needs_machine", c_bool),
        ("minimizes_memory", c_bool),
        ("exhaustive", c_bool),
        ("available", c_bool),
        ("optimal_in", c_char_p),
        ("summary", c_char_p),
        ("source", c_char_p),
        ("cost", c_char_p),
    ]


class Info(Structure):
    _fields_: ClassVar = [
        ("outcome", c_int),
        ("solver", c_char * 32),
        ("budget_bytes", c_int64),
        ("makespan_ns", c_int64),
        ("peak_bytes", c_int64),
        ("host_peak_bytes", c_int64),
        ("recompute_ns", c_int64),
        ("stall_ns", c_int64),
        ("lower_bound_ns", c_int64),
        ("gap", c_double),
        ("least_bytes", c_int64),
        ("least_is_exact", c_bool),
        ("least_lower_bytes", c_int64),
        ("store_all_bytes", c_int64),
        ("store_all_ns", c_int64),
        ("solve_ns", c_int64),
        ("solver_peak_bytes", c_int64),
        ("objective_bytes", c_int64),
        ("iterations", c_int64),
        ("checkpoint_count", c_int32),
        ("checkpoints", POINTER(c_int32)),
        ("stopped_early", c_bool),
        ("optimal_in", c_char * 24),
        ("reason", c_char * REASON_MAX),
        ("allocator", Allocator),
    ]


class Limits(Structure):
    _fields_: ClassVar = [
        ("least_bytes", c_int64),
        ("least_is_exact", c_bool),
        ("least_lower_bytes", c_int64),
        ("store_all_bytes", c_int64),
        ("store_all_ns", c_int64),
    ]


class Bound(Structure):
    _fields_: ClassVar = [
        ("lower_bound_ns", c_int64),
        ("method", c_char * 32),
        ("least_lower_bytes", c_int64),
    ]


class MaxBatch(Structure):
    _fields_: ClassVar = [
        ("batch", c_int64),
        ("refuted_batch", c_int64),
        ("budget_bytes", c_int64),
        ("makespan_ns", c_int64),
        ("peak_bytes", c_int64),
        ("recompute_ns", c_int64),
        ("forward_ns", c_int64),
        ("solver", c_char * 32),
        ("stopped_early", c_bool),
    ]


WriteCallback = CFUNCTYPE(c_int, c_void_p, POINTER(c_char), c_size_t)


class Sink(Structure):
    _fields_: ClassVar = [
        ("context", c_void_p),
        ("write", WriteCallback),
    ]


#: Name in C -> ctypes type, for the prototypes in _library.py and for the layout test.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "cairn_error": Error,
    "cairn_allocator": Allocator,
    "cairn_progress": Progress,
    "cairn_env": Env,
    "cairn_stage_option": StageOption,
    "cairn_stage": Stage,
    "cairn_chain": Chain,
    "cairn_node": Node,
    "cairn_graph": Graph,
    "cairn_machine": Machine,
    "cairn_problem_info": ProblemInfo,
    "cairn_op": Op,
    "cairn_schedule_info": ScheduleInfo,
    "cairn_violation": Violation,
    "cairn_replay": Replay,
    "cairn_observer": Observer,
    "cairn_option_info": OptionInfo,
    "cairn_solver_info": SolverInfo,
    "cairn_info": Info,
    "cairn_limits": Limits,
    "cairn_bound": Bound,
    "cairn_max_batch": MaxBatch,
    "cairn_sink": Sink,
}
OPAQUE: dict[str, type[ctypes.Structure]] = {
    "cairn_problem": Problem,
    "cairn_schedule": Schedule,
    "cairn_builder": Builder,
    "cairn_verified": Verified,
    "cairn_options": Options,
}
ENUMS = (
    "cairn_status",
    "cairn_outcome",
    "cairn_problem_kind",
    "cairn_op_code",
    "cairn_violation_code",
)
#: Constants that are written down again on this side; the layout test compares them.
CONSTANTS: dict[str, int] = {
    "CAIRN_NONE": NONE,
    "CAIRN_RECORDED": RECORDED,
    "CAIRN_ERROR_MESSAGE_MAX": ERROR_MESSAGE_MAX,
    "CAIRN_ERROR_PATH_MAX": ERROR_PATH_MAX,
    "CAIRN_REASON_MAX": REASON_MAX,
    "CAIRN_KIND_CHAIN": KIND_CHAIN,
    "CAIRN_KIND_GRAPH": KIND_GRAPH,
    "CAIRN_VALUE_OUTPUT": VALUE_OUTPUT,
    "CAIRN_VALUE_SAVED": VALUE_SAVED,
    "CAIRN_OPTION_SIZE": OPTION_SIZE,
    "CAIRN_OPTION_RATE": OPTION_RATE,
    "CAIRN_OPTION_DURATION": OPTION_DURATION,
    "CAIRN_OPTION_COUNT": OPTION_COUNT,
    "CAIRN_OPTION_CHOICE": OPTION_CHOICE,
    "CAIRN_OPTION_TEXT": OPTION_TEXT,
    "CAIRN_OPTION_FLAG": OPTION_FLAG,
}
