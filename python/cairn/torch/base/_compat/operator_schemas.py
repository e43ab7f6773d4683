"""Schemas of operators: their names, arguments and results."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload


def schema_of(operator: Any) -> Any:
    """The schema of an operator, a `torch.FunctionSchema`; None for a higher-order operator or a Python function."""
    return getattr(operator, "_schema", None)


def overload_of(operator: OpOverload) -> str:
    """The name of an operator's overload, such as "Tensor" of `aten.add.Tensor`."""
    return operator._overloadname
