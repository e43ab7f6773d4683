"""Models with checkpoints, transforms or weights of their own: part of a block, or refused by name."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cairn.torch as ct
import torch_models
from cairn.torch.profiling import option_proofs
from profile_support import Leaves, block_names, profiled
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded")


def test_all_sample_steps_are_the_same_step_of_a_model_that_counts_its_own() -> None:
    class Alternating(nn.Module):
        """Every other step takes more memory, the first one, too."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.steps = nn.Sequential(*(Leaves(32, 32) for _ in range(4))), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.layers(x.sin().exp().tanh() if self.steps % 2 else x)

    model, x = Alternating(), torch.randn(256, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    report = ct.verify(model, ct.plan(profile, least), x, loss_fn=torch.sum)
    assert report.ok and model.steps == 0


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch does not say whose hooks there are",
)
def test_blocks_in_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = nn.Sequential(Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Linear(16, 16), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '0\.0' within saved-tensor hooks .* take them out"):
        ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks="0.*")
    plan = ct.plan(ct.profile(model, torch.randn(8, 16), loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, torch.randn(8, 16), loss_fn=torch.sum).ok


def test_blocks_in_reentrant_checkpoints_of_the_models_own_are_refused() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = nn.Sequential(nn.Linear(16, 16), Checkpointed(*(Leaves(16, 16) for _ in range(3))), nn.Tanh())
    x = torch.randn(8, 16)
    for blocks in ("1.*", Leaves):
        with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within .* use_reentrant=True: take it out"):
            ct.profile(model, x, loss_fn=torch.sum, blocks=blocks)
    plan = ct.plan(ct.profile(model, x, loss_fn=torch.sum, blocks=model), "1GiB")
    assert ct.verify(model, plan, x, loss_fn=torch.sum).ok


class Transforming(torch_models.Residual):
    """A block that transforms its activation, or its layers, by torch.func."""

    def __init__(self, transform: str) -> None:
        super().__init__(32)
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        func = torch.func
        y = super().forward(x)
        if self.transform == "grad":
            return x + func.grad(lambda t: torch.tanh(t).sum())(y)
        if self.transform == "vjp":
            return x + func.vjp(torch.tanh, y)[1](y)[0]
        if self.transform == "jvp":
            return x + func.jvp(torch.tanh, (y,), (y,))[1]
        return x + self.down(func.vmap(self.up)(y))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
def test_derivatives_by_torch_func_inside_a_model_are_refused_by_name(transform: str) -> None:
    model = nn.Sequential(*(Transforming(transform) for _ in range(3)))
    with pytest.raises(ct.Unsupported, match=r"'0' differentiates by torch\.func .* plan the parts of the model"):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum)


def test_layers_that_run_in_vmap_are_part_of_the_block_around_it() -> None:
    model, x = nn.Sequential(*(Transforming("vmap") for _ in range(3))), torch.randn(64, 32)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_blocks_that_run_in_vmap_are_refused_by_name() -> None:
    class Mapping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = torch.func.vmap(layer)(x)
            return x

    model = nn.Sequential(nn.Linear(32, 32), Mapping(*(nn.Linear(32, 32) for _ in range(3))), nn.Tanh())
    with pytest.raises(ct.Unsupported, match=r"calls '1\.0' within a transform of torch\.func .*blocks="):
        ct.profile(model, torch.randn(8, 32), loss_fn=torch.sum, blocks="1.*")


def test_blocks_with_weights_that_the_model_computes_are_refused_by_name() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(torch_models.Residual(32) for _ in range(3)))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {name: p * self.scale for name, p in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, weights, (x,))

    model, plain, x = Scaling(), Scaling(), torch.randn(64, 32)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(ct.Unsupported, match=r"calls 'inner\.0' with weights .* plan the module that functional_call"):
        ct.profile(model, x, loss_fn=torch.sum)
    profile = ct.profile(model.inner, x, loss_fn=torch.sum)
    plan = ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes)
    with ct.apply(model.inner, plan):
        for one in (model, plain):
            torch.manual_seed(0)
            one(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class CheckpointInside(torch_models.Residual):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_blocks_are_part_of_them(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointInside, "reentrant", reentrant)
    model, x = nn.Sequential(*(CheckpointInside(32) for _ in range(4))), torch.randn(64, 32, requires_grad=True)
    profile = ct.profile(model, x, loss_fn=torch.sum)
    least = ct.plan(profile, 2**40).least_budget_bytes
    plan = ct.plan(profile, least)
    assert not plan.is_plain and ct.verify(model, plan, x, loss_fn=torch.sum).ok


def test_outputs_without_gradients_are_refused_with_what_may_take_them() -> None:
    model = nn.Sequential(*(CheckpointInside(32) for _ in range(2)))
    for loss_fn in (None, torch.sum):
        with pytest.raises(ValueError, match=r"output does not require gradients.* use_reentrant=False does"):
            ct.profile(model, torch.randn(8, 32), loss_fn=loss_fn)


def test_what_a_backward_cannot_recompute_is_no_option_even_if_the_memory_looks_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The LSTM of oneDNN returns memory that only its backward reads, never quite written; none where there is none."""
    monkeypatch.setattr(option_proofs, "_same", lambda first, second: True)
    profile = profiled(torch_models.recurrent())
    assert not any("rnn" in option.recomputes for stage in profile.stages for option in stage.options)


def test_modules_with_parts_are_not_merged_although_nothing_saves_what_lies_between_them() -> None:
    class Shifted(torch_models.Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 1)

    model = nn.Sequential(*(Shifted() for _ in range(4)))
    for _ in range(3):
        assert block_names(ct.profile(model, torch.randn(32, 64), loss_fn=torch.sum, passes=1)) == ["0", "1", "2", "3"]


def test_a_profile_within_a_cache_of_weights_is_refused() -> None:
    """It would take every weight to be there already."""
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)))
    with nn.utils.parametrize.cached(), pytest.raises(ct.Unsupported, match=r"cached\(\) span the model's forward"):
        ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum)
    ct.profile(model, torch.randn(4, 8), loss_fn=torch.sum, passes=1)


def test_a_block_that_descends_in_its_own_forward_is_kept() -> None:
    class Descending(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(inner).square().sum(), inner)
            return super().forward(x - gradient)

    model, x = nn.Sequential(nn.Linear(8, 8), Descending(8, 8)), torch.randn(4, 8)
    profile = ct.profile(model, x, loss_fn=torch.sum, passes=1)
    assert [stage.keep_reason for stage in profile.stages[:2]] == ["", "takes gradients in its own forward"]
    assert ct.verify(model, ct.plan(profile, ct.plan(profile, 2**40).least_budget_bytes), x, loss_fn=torch.sum).ok
