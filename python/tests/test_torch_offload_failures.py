"""Failures under `cairn.torch.offload` are clear and leave the next step sound."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import cairn.torch as ct
import pytest
import torch
from cairn.torch.base._compat import saved_tensor_hooks_are_active
from cairn.torch.offloading.offload import Offload
from offload_support import (
    KIB,
    Chain,
    build,
    context_fixture,  # noqa: F401
    same,
    step,
)


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", ["pwrite", "preadv"])
def test_a_failing_copy(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=8 * KIB)
    assert same(expected, step(model, x, saved))
    with monkeypatch.context() as patched:
        patched.setattr(os, fault, full)
        with pytest.raises(ct.TransferFailed, match=f"copying saved storage .*{tmp_path}.*No space left on device"):
            step(model, x, saved)
    for _ in range(2):
        assert same(expected, step(model, x, saved))


def test_a_failing_copy_and_the_graph_of_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read that was not written: what the failed step has left behind is refused by name."""
    model, x = build("attention")
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0, resident_bytes=8 * KIB)
    with saved:
        earlier = model(x).sum()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ct.TransferFailed):
            step(model, x, saved)
    with pytest.raises((ct.TransferFailed, ct.Unsupported), match="cancelled|step that is over"):
        earlier.backward(retain_graph=True)  # what it passes before it fails stays
    step(model, x, saved)
    with pytest.raises(ct.Unsupported, match="step that is over"):
        earlier.backward()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())
    saved = ct.offload(model, x, tier=f"file:{tmp_path}", min_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ct.TierUnavailable, match=f"{tmp_path}.*are free: No space left on device"):
            step(model, x, saved)
    assert same(expected, step(model, x, saved))


def test_an_exception_in_the_forward_and_in_the_backward(context: Offload) -> None:
    model, x = build("attention")
    expected = step(model, x, contextlib.nullcontext())

    def stop(*_: Any) -> None:
        raise KeyError("stop")

    for where in (model[1].register_forward_hook, model[0].out.weight.register_hook):
        handle = where(stop)
        with pytest.raises(KeyError):
            step(model, x, context)
        handle.remove()
        assert same(expected, step(model, x, context))
        assert not saved_tensor_hooks_are_active()


def test_a_closed_one_refuses() -> None:
    x = torch.randn(1024, requires_grad=True)
    saved = ct.offload(min_bytes=0, resident_bytes=0)
    with saved:
        loss = Chain()(x).sum()
    saved.close()
    saved.close()
    with pytest.raises(ct.Unsupported, match="was closed"):
        loss.backward()
    with pytest.raises(ct.Unsupported, match="was closed"), saved:
        pass


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tier": "disk"}, ct.Unsupported, "'host' or 'file:PATH'"),
        ({"tier": "file:/nonexistent/slab"}, ct.TierUnavailable, "/nonexistent/slab"),
        ({"host_budget": -1}, ValueError, "host_budget is -1; at least 0"),
        ({"host_budget": "50%"}, ValueError, 'host_budget: "50%" is not a size'),
        ({"min_bytes": "much"}, ValueError, 'min_bytes: "much" is not a size'),
        ({"streams": 3}, ValueError, "streams is 3"),
        ({"resident_bytes": 0.5}, TypeError, "resident_bytes .* 0.5"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ct.offload(**options)


@pytest.mark.parametrize("given", ["64MiB", [torch.ones(2)], torch.float32])
def test_what_cannot_be_left_alone(given: Any) -> None:
    with pytest.raises(TypeError, match=f"modules and tensors by position, .* not {type(given).__name__}"):
        ct.offload(torch.ones(2), given)


def test_where_torch_forbids_hooks(context: Offload) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        context,
    ):
        pass
