"""What tests of refusals share."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from executor_models import STAGES, loss_of
from executor_support import Op, differing, train
from torch import nn


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Any:
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


def sound_afterwards(model: nn.Module, stages: Any = STAGES, ops: list[Op] | None = None) -> None:
    """After an error, the next step of the same planned model is the plain one."""
    plain = copy.deepcopy(model)
    plain.zero_grad(), model.zero_grad()
    assert not differing(train(plain, loss_of), train(model, loss_of))
