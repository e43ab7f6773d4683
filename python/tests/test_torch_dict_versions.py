"""`DictVersions` notices every change of a dict, however it is made, and holds if there is none."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cairn.torch.base import _compat
from cairn.torch.base._compat import dict_contents, dict_versions
from cairn.torch.base._compat.dict_versions import DictVersions
from torch import nn

pytestmark = pytest.mark.skipif(_compat.number_at() is None, reason="this interpreter gives dicts no numbers")


class Plain:
    def __init__(self) -> None:
        self.value, self.other = 1, "one"


class InSlots(Plain):
    __slots__ = ("slot",)


class Of:
    """A part, an object, one with a slot, and dicts."""

    def __init__(self) -> None:
        self.owners: list[Any] = [nn.Linear(2, 2), nn.Dropout(), Plain(), InSlots()]
        self.owners[0].register_buffer("buffer", None)
        self.dicts: list[dict[Any, Any]] = [self.owners[0]._parameters, {}, collections.OrderedDict(a=1), {1: 2}]

    def versions(self) -> DictVersions:
        found = DictVersions.of(self.owners, self.dicts)
        assert found is not None and found.holds()
        return found


_CHANGES: dict[str, Callable[[Of], object]] = {
    "an attribute": lambda of: setattr(of.owners[2], "value", 2),
    "an attribute of one with slots": lambda of: setattr(of.owners[3], "value", 2),
    "an attribute of a module": lambda of: setattr(of.owners[1], "p", 0.25),
    "a new attribute": lambda of: setattr(of.owners[2], "new", 1),
    "one attribute less": lambda of: delattr(of.owners[2], "value"),
    "all attributes replaced": lambda of: setattr(of.owners[2], "__dict__", dict(vars(of.owners[2]))),
    "another class": lambda of: setattr(of.owners[2], "__class__", type("Other", (), {})),
    "another class of a module": lambda of: setattr(of.owners[1], "__class__", nn.Dropout2d),
    "a parameter replaced": lambda of: setattr(of.owners[0], "weight", nn.Parameter(of.owners[0].weight.detach())),
    "a parameter taken away": lambda of: setattr(of.owners[0], "bias", None),
    "an item": lambda of: of.dicts[3].update({1: 3}),
    "an item of an ordered dict": lambda of: of.dicts[2].pop("a"),
    "the first item": lambda of: of.dicts[1].setdefault("first", 1),
    "an item that comes and goes": lambda of: (of.dicts[1].update(a=1), of.dicts[1].clear()),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_is_told(what: str) -> None:
    of = Of()
    found = of.versions()
    _CHANGES[what](of)
    assert not found.holds()
    assert of.versions().holds()  # as it is now


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_is_told_by_code_that_ran_often(what: str) -> None:
    for _ in range(100):  # the interpreter has its own short ways by then
        test_a_change_is_told(what)


def test_what_is_no_change_holds() -> None:
    of = Of()
    found = of.versions()
    of.owners[2].value = of.owners[2].value
    of.owners[0].weight.requires_grad_(False)  # within what the dict has
    of.owners[3].slot = 1  # is in no dict
    others = [Of() for _ in range(100)]
    del others
    gc.collect()
    assert found.holds()


def test_nothing_is_kept_alive() -> None:
    of = Of()
    counts = list(map(sys.getrefcount, [*of.owners, *of.dicts]))
    found = of.versions()
    assert list(map(sys.getrefcount, [*of.owners, *of.dicts])) == counts
    del found


def test_objects_of_another_layout_have_no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text(str):  # of variable size
        pass

    assert DictVersions.of([Text("some")], []) is None or sys.version_info >= (3, 11)
    monkeypatch.setattr(dict_versions, "_dict_at", lambda cls: dict_versions._CLASS)
    assert DictVersions.of([Plain()], []) is None


def test_without_change_counters_there_are_no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_contents, "tells_changes", lambda number: False)
    _compat.number_at.cache_clear()
    try:
        assert _compat.number_at() is None and DictVersions.of([Plain()], [{}]) is None
    finally:
        monkeypatch.undo()
        _compat.number_at.cache_clear()


def test_the_interpreters_numbers_do_where_torchs_miss_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    monkeypatch.setattr(dict_contents._guards, "dict_version", lambda names: -1)
    _compat.number_of_contents.cache_clear()
    try:
        before = _compat.contents([names])
        assert before is not None and _compat.contents([names]) == before
        names["new"] = 1
        assert _compat.contents([names]) != before
    finally:
        _compat.number_of_contents.cache_clear()
