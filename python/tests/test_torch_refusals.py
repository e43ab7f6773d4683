"""Models that recompute by themselves, and arguments of other models: told by name before anything is measured."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded")


class Timm(nn.Module):
    """Recomputes its blocks as models of timm and open_clip do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(torch_models.Residual(16) for _ in range(4)))
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.grad_checkpointing else block(x)
        return x


@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing_of_timm_is_refused_by_the_name_of_its_switch(inside: bool) -> None:
    timm, x = Timm(), torch.randn(8, 16)
    model = nn.Sequential(timm, nn.Linear(16, 2)) if inside else timm
    timm.set_grad_checkpointing()
    with pytest.raises(ct.Unsupported, match=r"model\.set_grad_checkpointing\(False\)"):
        ct.profile(model, x, loss_fn=torch.sum, passes=1)
    timm.set_grad_checkpointing(False)
    assert len(ct.profile(model, x, loss_fn=torch.sum, passes=1).refs) >= 4


def test_checkpointing_of_timm_that_is_switched_on_later_is_told() -> None:
    model, x = Timm(), torch.randn(8, 16)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, passes=1), "1GiB")
    with ct.apply(model, plan):
        model.set_grad_checkpointing()
        with pytest.warns(UserWarning, match=r"model\.set_grad_checkpointing\(False\)"):
            model(x)


def test_an_optimizer_of_another_model_is_told() -> None:
    model, other = Timm(), Timm()
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.warns(UserWarning, match="has none of the model's parameters: is it the one of another model"):
        ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, optimizer=optimizer, passes=1)
