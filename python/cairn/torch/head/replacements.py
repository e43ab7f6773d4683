"""Replacements outside of blocks that need less memory: the gradient of a tied embedding (`tied_embedding.py`), the
loss (`loss.py`), and head and loss together if the model calls a function that computes both (`head.py`).

They do not change the results of a model. They are used if a profile has proved on the sample's own tensors that they
give the same bits. A tied weight is replaced only if a forward uses it in no other way than in calls of `embedding`,
`linear` and `linear_cross_entropy` outside blocks: other uses would add to its gradient in another order. The loss is
replaced if the model itself calls `cross_entropy`. A torch function mode intercepts these calls, in the profile and in
training; it is inactive while blocks run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..base import _compat
from ..base.blocks import Block, intercepted
from ..base.errors import PlanMismatch
from ..base.layouts import saving_nothing
from ..base.tree import tensors_in
from . import head, head_proof, loss, tied_embedding


@dataclasses.dataclass(frozen=True)
class Replacements:
    """The replacements outside of blocks.

    tied: names of the weights whose uses are replaced. loss: whether the model's own cross entropy is. heads: how each
    `linear_cross_entropy` is computed, PyTorch's as Cairn's. runs: the functions of stages outside blocks, for reports.
    """

    tied: tuple[str, ...] = ()
    loss: bool = False
    heads: tuple[head.HeadMethod, ...] = ()
    runs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        heads = [method.to_json() for method in self.heads]
        return {"tied": list(self.tied), "loss": self.loss, "heads": heads, "runs": dict(self.runs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Replacements:
        """Reads what `to_json` wrote."""
        heads = tuple(map(head.HeadMethod.from_json, data.get("heads", ())))
        return cls(tuple(data.get("tied", ())), bool(data.get("loss", False)), heads, dict(data.get("runs", {})))

    def notes(self) -> list[str]:
        """The replacements as sentences for a report."""
        notes = [f"{name} is embedding and head: its gradients are added in place" for name in self.tied]
        notes += ["the model's cross entropy makes no further copies of the logits in its backward"] * self.loss
        return notes + [each.note() for each in self.heads]

    def check_proofs(self) -> None:
        """Raises PlanMismatch where heads cannot be computed as they were when they were profiled."""
        for method in self.heads:
            if method.case is not None and not method.holds_still():
                raise PlanMismatch(
                    f"{method.note()}, which gives the bits of the whole where it was profiled "
                    f"({method.case.conditions}), but not here ({head_proof.conditions()}): profile again"
                )


# -- finding -------------------------------------------------------------------------------------------------


def find(model: nn.Module, forward: Callable[[], Any], blocks: Sequence[Block]) -> Replacements:
    """The possible replacements, determined by one forward of the model."""
    inside = {id(p) for block in blocks for part in block.modules for p in part.parameters()}
    weights = {name: p for name, p in model.named_parameters() if id(p) not in inside and p.requires_grad and p.is_leaf}
    usage = _Usage(list(weights.values()))
    with saving_nothing(), usage, intercepted(blocks, usage.run_block, usage.within_block):
        forward()
    shared = [name for name, weight in weights.items() if usage.is_tied(weight)]
    return Replacements(tuple(shared), bool(usage.losses) and all(usage.losses), tuple(dict.fromkeys(usage.heads)))


@dataclasses.dataclass
class _Uses:
    """The uses of one weight in a forward."""

    lookups: list[bool] = dataclasses.field(default_factory=list)  # whether each was proved
    products: int = 0
    others: int = 0


class _Usage(_compat.FunctionMode):
    """The uses of some weights in a forward, and whether its losses can be replaced."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._uses = {id(weight): _Uses() for weight in weights}
        self._is_in_block = False
        self.losses: list[bool] = []
        self.heads: list[head.HeadMethod] = []

    def is_tied(self, weight: torch.Tensor) -> bool:
        """Whether it is looked up and multiplied by, and no more."""
        uses = self._uses[id(weight)]
        return uses.others == 0 and uses.products > 0 and bool(uses.lookups) and all(uses.lookups)

    def run_block(self, block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Unseen if it is compiled, for it would be compiled again; then a weight that it is passed is used by it."""
        if not block.is_compiled:
            return function(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._uses:
                self._uses[id(tensor)].others += 1
        with _compat.function_mode_set_aside(self):
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def within_block(self) -> Iterator[None]:
        """The context around blocks: their use of a weight counts as another use."""
        self._is_in_block = True
        try:
            yield
        finally:
            self._is_in_block = False

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function is F.cross_entropy and not self._is_in_block:
            self.losses.append(_loss_proved(*args, **kwargs))
        if function is head.linear_cross_entropy or (_is_head(function, kwargs) and not self._is_in_block):
            self.heads.append(head.examined(*args, **kwargs))
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._uses:
                self._note(self._uses[id(tensor)], function, tensor, args, kwargs, result)
        return result

    def _note(self, uses: _Uses, function: Any, weight: torch.Tensor, args: Any, kwargs: Any, result: Any) -> None:
        if torch.is_autocast_enabled(weight.device.type):  # in a region within the forward
            uses.others += 1
        elif not self._is_in_block and _is_lookup(function, args, kwargs) and args[1] is weight:
            uses.lookups.append(tied_embedding.proved(weight, args[0], kwargs.get("padding_idx")))
        elif not self._is_in_block and _multiplies_by(weight, function, args, kwargs):
            uses.products += 1
        elif any(t.requires_grad for t in tensors_in(result)):
            uses.others += 1


def _is_lookup(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    special = kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse")
    return function is F.embedding and len(args) == 2 and not special


def _is_product(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    return function is F.linear and 2 <= len(args) <= 3 and set(kwargs) <= {"bias"}


def _is_head(function: Any, kwargs: Mapping[str, Any]) -> bool:
    return function in head.FUNCTIONS and kwargs.get("options") is None


def _multiplies_by(weight: torch.Tensor, function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    is_product = _is_product(function, args, kwargs) or _is_head(function, kwargs)
    return is_product and args[1] is weight and args[0] is not weight


def _loss_proved(input: torch.Tensor, *arguments: Any, **keywords: Any) -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return loss.proved(input, arguments, keywords)


# -- replacing -----------------------------------------------------------------------------------------------


class Replaced:
    """Applies the replacements in the forwards of one model; `anything`: whether there are any."""

    def __init__(self, model: nn.Module, replacements: Replacements) -> None:
        self._model, self._tied = weakref.ref(model), replacements.tied
        self._mode = (
            _Replacing(replacements.loss) if replacements.loss or replacements.tied or replacements.heads else None
        )
        self.anything = self._mode is not None

    @contextlib.contextmanager
    def during_forward(self) -> Iterator[None]:
        """Around a forward of the model that is to be trained."""
        model = self._model()
        if self._mode is None or model is None:
            yield
            return
        with self._mode.tying([model.get_parameter(name) for name in self._tied]), self._mode:
            yield

    def during_block(self) -> contextlib.AbstractContextManager[None]:
        """Around a block within it, whose operations need not be looked at."""
        return contextlib.nullcontext() if self._mode is None else _compat.function_mode_set_aside(self._mode)


class _Replacing(_compat.FunctionMode):
    """Intercepts the functions that a forward calls outside of blocks."""

    def __init__(self, loss_too: bool) -> None:
        super().__init__()
        self._loss_too = loss_too
        self._thread = threading.local()

    @contextlib.contextmanager
    def tying(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Uses of these weights by this thread are tied."""
        self._thread.weights = {id(weight) for weight in weights if weight.requires_grad}
        try:
            yield
        finally:
            self._thread.weights = set()

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is F.cross_entropy and self._loss_too:
            return loss.cross_entropy(*args, **kwargs)
        if _is_lookup(function, args, kwargs) and self._is_tied(args[1]):
            return self._tie(args[1]).embedding(args[0], kwargs.get("padding_idx"))
        if _is_product(function, args, kwargs) and self._is_tied(args[1]):
            return self._tie(args[1]).linear(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
        if _is_head(function, kwargs):
            options = {name: value for name, value in kwargs.items() if name != "options"}
            weight = self._tie(args[1]).whole() if self._is_tied(args[1]) else args[1]
            return head.linear_cross_entropy(args[0], weight, *args[2:], **options)
        return function(*args, **kwargs)

    def _is_tied(self, weight: torch.Tensor) -> bool:
        if id(weight) not in getattr(self._thread, "weights", ()) or not torch.is_grad_enabled():
            return False
        return not torch.is_autocast_enabled(weight.device.type)

    def _tie(self, weight: torch.Tensor) -> tied_embedding.Tie:
        """The one that graphs of this thread use already, as long as they live."""
        ties: weakref.WeakValueDictionary[int, tied_embedding.Tie] = vars(self._thread).setdefault(
            "ties", weakref.WeakValueDictionary()
        )
        tie = ties.get(id(weight))
        if tie is None or not tie.holds_for(weight):
            tie = ties[id(weight)] = tied_embedding.Tie(weight)
        return tie
