"""What is recorded of a block, and reasons not to record it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cairn.torch.selective.block_graph import Pack, Use
from cairn.torch.selective.recompute import sample_of
from recorded_support import Recorded, gelu, leaf
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

# -- what is recorded -----------------------------------------------------------------------------------------


def test_reasons_not_to_open() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda x: x * x.sum().item(), "depends on the values"),
        (lambda x: x[x > 0], "depends on the values"),
        (lambda x: x * x.detach().tolist()[0][0], "reads tensors from Python"),
        (lambda x: x.detach().add_(1) * x.sin(), "writes what it did not make"),
    ]
    for function, reason in cases:
        assert reason in Recorded(function, leaf(8, 8)).graph.refusal
    assert not Recorded(gelu, leaf(8, 8)).graph.refusal


def test_values_that_functions_read_themselves_are_a_reason_not_to_open() -> None:
    places, lengths = torch.tensor([1, 5]), torch.tensor([4, 3, 1])
    reading: list[Any] = [
        lambda x, places: x.tensor_split(places, -1)[1].sin(),
        lambda x, places: torch.tensor_split(x, tensor_indices_or_sections=places)[0].sin(),
        lambda x, places: pad_packed_sequence(PackedSequence(x, lengths))[0].sin(),
    ]
    for function in reading:
        assert "depends on the values of its tensors" in Recorded(function, leaf(8, 8), places).graph.refusal
    harmless: list[Any] = [
        lambda x, places: x[places].sin(),
        lambda x, places: x[:2, :1].expand_as(places.view(2, 1).expand(2, 4)).sin(),
        lambda x, places: x[places.long().contiguous().view(2)].sin() * places.shape[0],
        lambda x, places: x.type_as(x.to(places)).sin() * places.to(x.dtype).sum(),
        lambda x, places: F.embedding(places, x).sin(),
        lambda x, places: torch.where(x > 0, x, 0).sin().masked_fill(x > 1, 0.0),
    ]
    for function in harmless:
        assert not Recorded(function, leaf(8, 8), places).graph.refusal


def test_reasons_not_to_replay() -> None:
    def two_draws(x: Tensor) -> Tensor:
        noise = torch.rand(8, 8) + torch.rand(8, 8)
        return torch.tanh(x * noise)

    graph = Recorded(two_draws, leaf(8, 8)).graph
    assert [op.reason for op in graph.operations if op.random] == ["", "draws where the random state is not at hand"]
    constant = Recorded(lambda x: x * torch.tensor([1.0] * 8), leaf(8, 8)).graph
    assert all(op.reason or op.name == "aten.mul.Tensor" for op in constant.operations)


def test_digest_does_not_depend_on_sizes() -> None:
    small, large = Recorded(gelu, leaf(8, 8)), Recorded(gelu, leaf(24, 24))
    assert small.graph.digest() == large.graph.digest()
    other = Recorded(lambda x: gelu(x).tanh(), leaf(8, 8))
    assert other.graph.digest() != small.graph.digest()


def test_digest_does_not_depend_on_arguments_that_are_not_used() -> None:
    """Trainers pass a count of tokens down to every layer."""
    x, y = leaf(8, 8), leaf(8, 8)
    alone = Recorded(lambda a, b: gelu(a) * b.tanh(), x, y).graph.digest()
    assert (
        Recorded(lambda count, a, spare, b: gelu(a) * b.tanh(), torch.tensor(3), x, leaf(2), y).graph.digest() == alone
    )
    assert Recorded(lambda a, b: gelu(a) * a.tanh(), x, y).graph.digest() != alone
    assert Recorded(lambda a, b: gelu(b) * a.tanh(), x, y).graph.digest() == alone  # as if they had changed names


# -- comparing a few bytes -----------------------------------------------------------------------------------


_VIEWS: dict[str, Any] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.mT,
    "columns": lambda x: x[:, 3:9],
    "every other column": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 5],
    "expanded": lambda x: x[:, 5:6].expand(-1, 4),
    "one number": lambda x: x[7, 5],
    "channels last": lambda x: x.view(2, 3, 4, 16).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", _VIEWS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_samples_are_of_the_tensor_and_of_nothing_beside_it(view: str, dtype: torch.dtype) -> None:
    viewed = _VIEWS[view](torch.empty(24, 16))
    look = (tuple(viewed.shape), tuple(viewed.stride()), int(viewed.storage_offset()))
    whole, is_inside = torch.ones(24 * 16, dtype=dtype), torch.zeros(24 * 16, dtype=torch.bool)
    is_inside[torch.arange(24 * 16).as_strided(*look).flatten()] = True
    part = whole.as_strided(*look)
    sample = sample_of(Pack(Use(0, look), part.shape, dtype, part.device, None))
    assert sample is not None
    before = sample.of(part)
    whole[~is_inside] = 0
    assert sample.of(part) == before
    whole[is_inside] = 0
    assert all(now != then for now, then in zip(sample.of(part), before, strict=True))


def test_a_sample_tells_noises_apart_that_agree_in_single_places() -> None:
    """One number of each of two places would be zero in every sixteenth pair of noises."""
    sample = sample_of(
        Pack(Use(0, ((64, 64), (64, 1), 0)), torch.Size((64, 64)), torch.float32, torch.device("cpu"), None)
    )
    assert sample is not None
    generator = torch.Generator().manual_seed(0)
    noises = [
        torch.rand(64, 64, generator=generator) * (torch.rand(64, 64, generator=generator) > 0.5) for _ in range(100)
    ]
    assert len({sample.of(noise) for noise in noises}) == 100
