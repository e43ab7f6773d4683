"""Effects of operators other than new tensors: an operator may write its arguments, or turn tensors into numbers.

Schemas and tags of operators declare most of these effects. This file lists the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _compat
from .errors import PlanMismatch

#: any operator: one overload of one function of torch.ops
Operator = Any

#: arguments, by position, that an operator writes although its schema does not say so, and the position of the flag
#: that makes it do so
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
}

#: Operators that overwrite all of a tensor and do not read it.
_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)

#: operators that compute what their mask asks for, each part by itself: where the mask is, and the parts
_PARTS = {"aten::convolution_backward": (10, ((0,), (1, 2)))}

#: On CUDA, sums whose order is not fixed, and writes of which the last wins; with their forms in place
UNORDERED = frozenset(
    (
        *("index_add", "index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "index_reduce", "put"),
        *("scatter", "scatter_add", "scatter_reduce", "segment_reduce", "bincount", "histc", "cumsum", "cumprod"),
        *("logcumsumexp", "nll_loss2d_forward", "max_unpool2d", "max_unpool3d", "median", "nanmedian", "kthvalue"),
        *("mode", "convolution_backward", "embedding_dense_backward", "_embedding_bag_backward", "_cudnn_rnn_backward"),
        *("_flash_attention_backward", "_efficient_attention_backward", "_cudnn_attention_backward"),
        *(f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")),
        *(f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
        *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward", "_ctc_loss_backward"),
        *("grid_sampler_2d_backward", "grid_sampler_3d_backward", "avg_pool3d_backward"),
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
        *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_pool2d_with_indices_backward"),
        *("max_pool3d_with_indices_backward", *(f"reflection_pad{n}d_backward" for n in (1, 2, 3))),
        *(f"replication_pad{n}d_backward" for n in (1, 2, 3)),
    )
)

_LITERALS = ("aten::lift_fresh", "aten::lift_fresh_copy")
_IN_PLACE_COLLECTIVES = "c10d::"
_COLLECTIVES = (_IN_PLACE_COLLECTIVES, "_c10d_functional::", "_c10d_functional_autograd::")


def is_higher_order(operator: Operator) -> bool:
    """Whether an operator runs functions that it is given (cond, scan, ...). Such operators have no schema."""
    return _compat.schema_of(operator) is None


def repeats(name: str, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether an operator, by its name without a library's, gives the same bits whenever it is called with these."""
    return name.rstrip("_") not in UNORDERED or not any(map(_is_on_cuda, tensors))


def _is_on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@dataclass(frozen=True)
class Facts:
    """The effects of one operator.

    Attributes
    ----------
    name
        As in torch, "aten::add_".
    written
        The arguments that it writes, by position or by keyword.
    is_collective
        It talks to other processes.
    is_literal
        It makes a tensor of numbers in the program text.
    overwrites
        It does not read the argument that it writes.
    changes_view
        It writes a tensor's shape and strides, not its contents.
    """

    name: str
    written: tuple[int | str, ...]
    is_collective: bool
    is_literal: bool
    overwrites: bool
    changes_view: bool

    def tensors_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call writes into."""
        if self.name.startswith(_IN_PLACE_COLLECTIVES):
            return list(tensors_of([*args, *kwargs.values()]))  # the schemas do not say which
        positions, flag = _UNDECLARED_WRITES.get(self.name, ((), None))
        written: list[int | str] = list(self.written)
        if flag is not None and args[flag]:
            written += positions
        return list(tensors_of([_argument(args, kwargs, where) for where in written]))


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], where: int | str) -> Any:
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


@functools.cache
def facts_of(operator: Operator) -> Facts:
    """The facts about an operator."""
    schema = _compat.schema_of(operator)
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Facts(
        name=schema.name,
        written=written,
        is_collective=schema.name.startswith(_COLLECTIVES),
        is_literal=schema.name in _LITERALS,
        overwrites=schema.name in _OVERWRITING,
        changes_view=torch.Tag.inplace_view in operator.tags,
    )


def reads_numbers(operator: Operator, args: Sequence[Any]) -> bool:
    """Whether a call returns numbers or shapes that depend on values of tensors, so that the program may branch on
    them.
    """
    if operator is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1]))
    tags = operator.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def parts_of(facts: Facts, args: Sequence[Any]) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """A call as several calls, each of which computes some of the results: positions of results, and arguments.

    A gradient of weights, which stays, need not share a node with a gradient that is on its way.
    """
    position, parts = _PARTS.get(facts.name, (0, ()))
    if not parts:
        return []
    mask = args[position]
    asked = [part for part in parts if any(mask[i] for i in part)]
    if len(asked) < 2:
        return []
    calls: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
    for part in asked:
        own = [mask[i] and i in part for i in range(len(mask))]
        calls.append((part, (*args[:position], own, *args[position + 1 :])))
    return calls


@functools.cache
def out_of_place(operator: Operator) -> Operator | None:
    """The operator that returns a new tensor where this one writes its first argument: add for add_."""
    namespace, _, name = _compat.schema_of(operator).name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    functional = getattr(packet, _compat.overload_of(operator), None)
    if functional is None or facts_of(functional).written:
        return None
    names = [[argument.name for argument in _compat.schema_of(each).arguments] for each in (operator, functional)]
    return functional if names[0] == names[1] else None


def label(function: Callable[..., Any]) -> str:
    """The name of an operator for people: "addmm", "add_"."""
    schema = _compat.schema_of(function)
    return function.__name__ if schema is None else str(schema.name).rpartition("::")[2]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or results of an operator: bare, or in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


class Checked:
    """An operator whose results must be those of the trace: the same numbers, or tensors of the same shapes."""

    def __init__(self, operator: Callable[..., Any], given: Any) -> None:
        self._operator, self._given = operator, _visible(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it and compares."""
        given = self._operator(*args, **kwargs)
        if _visible(given) != self._given:
            raise PlanMismatch(
                f"{self} gave {self._given} when the step was traced and gives {_visible(given)} now: the step would "
                "take another branch than the graph; trace it again"
            )
        return given

    def __repr__(self) -> str:
        return getattr(self._operator, "__name__", str(self._operator))


class SynchronousCollective:
    """A collective that has ended when it returns."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it and waits."""
        result = self._operator(*args, **kwargs)
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(each)
            elif hasattr(each, "wait"):
                each.wait()
        return result

    def __repr__(self) -> str:
        return str(self._operator)


def _visible(given: Any) -> Any:
    """The part of a result that the program can read: numbers, or the shapes of tensors."""
    if isinstance(given, torch.Tensor):
        return f"a tensor of shape {list(given.shape)}"
    if isinstance(given, (tuple, list)):
        return [_visible(item) for item in given]
    return repr(given)


# -- operations that no operator of torch's stands for -------------------------------------------------------


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout on a copy of the storage."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def view_of_storage(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor with this geometry in the storage of another tensor."""
    alias = torch.empty(0, dtype=dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), offset, tuple(size), tuple(stride))


def new_empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor without values."""
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)
