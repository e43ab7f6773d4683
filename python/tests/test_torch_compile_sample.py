"""`compile` holds no tensors of its sample, and compares steps of others in their place."""

import gc

import cairn.torch as ct
import pytest
import torch
from cairn.torch.compiled import region_levels
from cairn.torch.profiling.sample import Sample
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Embedded(nn.Module):
    """Takes numbers, whole numbers that must stay below 8, and a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)))

    def forward(self, x, ids, *, mask):
        return F.dropout(self.blocks((x + self.rows(ids)).masked_fill(mask, 0.0)))


def squared(output):
    return output.square().mean()


def sample(rows=64):
    return (torch.randn(rows, 16), torch.randint(8, (rows,))), {"mask": torch.rand(rows, 16) > 0.5}


@pytest.mark.parametrize("regions", [True, False])
def test_no_tensor_of_the_sample_stays_and_steps_are_compared_all_the_same(monkeypatch, regions):
    monkeypatch.setattr(region_levels, "MAX_OPTIONS", 2)
    torch._dynamo.reset()
    model = Embedded()
    settings = {"kernels": "eager", "loss_fn": squared, "regions": regions, "progress": False, "time_limit": "300ms"}

    def is_alive(copied):
        gc.collect()
        tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor and t is not copied)
        return any(t.shape == copied.shape and t.dtype == copied.dtype and torch.equal(t, copied) for t in tensors)

    args, kwargs = sample()
    compiled, copied = ct.compile(model, args, kwargs, budget="1GiB", **settings), args[0].clone()
    peak = ct.report(compiled).measured_peak_bytes
    assert is_alive(copied)
    del args
    assert not is_alive(copied)
    for _ in range(2):
        again = ct.verify(compiled)
        assert again.differences == () and again.measured_peak_bytes == peak
    if regions:
        args, kwargs = sample(96)
        squared(compiled(*args, **kwargs)).backward()  # larger inputs, which are planned
        copied = args[0].clone()
        del args
        assert not is_alive(copied) and ct.verify(compiled).differences == ()
        args, kwargs = sample(96)
        ct.compile(model, args, kwargs, budget="2GiB", **settings)
        copied = args[0].clone()
        del args
        assert not is_alive(copied) and ct.verify(compiled).differences == ()


def test_what_stands_for_the_tensors_of_a_sample_is_as_they_were():
    model = nn.Linear(4, 4)
    inputs = {
        "drawn": torch.randn(3, 4).t() * 5 + 7,
        "leaf": torch.randn(2, dtype=torch.bfloat16).requires_grad_(),
        "infinite": torch.tensor([0.0, float("-inf")]),
        "nan": torch.tensor([float("nan"), 1.0]),
        "ids": torch.arange(6),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "own": model.weight,
    }
    made = Sample(model, (), dict(inputs), None)
    with made.released():
        pass
    for _ in range(2):
        with made.redrawn():
            again = made.kwargs
        for name, before in inputs.items():
            one = again[name]
            assert (one.shape, one.dtype, one.layout) == (before.shape, before.dtype, before.layout)
            assert one.requires_grad == before.requires_grad
            if name in ("drawn", "leaf"):
                low, high = torch.aminmax(before.detach())
                assert low <= one.min() and one.max() <= high and one.stride() == before.stride()
                assert not torch.equal(one, before)
            else:
                assert torch.equal(one.to_dense().nan_to_num(), before.to_dense().nan_to_num())
        assert again["own"].data_ptr() == model.weight.data_ptr()
