"""Stages of chains and their options, as Python and as C have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _structs
from ._errors import BadInput
from ._library import text_of
from ._units import encoded, flag, list_of, normalize


@dataclass(frozen=True)
class Option:
    """One way to run a stage.

    Attributes
    ----------
    saved_bytes
        All that the backward needs, bytes: the stage's output included, its input excluded.
    forward_ns
        Time of the forward that saves it, nanoseconds.
    backward_ns
        Time of the backward, nanoseconds.
    forward_workspace_bytes
        Memory beyond the result while that forward runs, bytes; may be negative.
    backward_workspace_bytes
        The same of the backward.
    name
        For people.
    """

    saved_bytes: int
    forward_ns: int
    backward_ns: int
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    name: str = "keep"

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        normalize(
            self,
            saved_bytes=0,
            forward_ns=0,
            backward_ns=0,
            forward_workspace_bytes=None,
            backward_workspace_bytes=None,
        )
        encoded(self.name, "name of an option")


_OPTION_FIELDS = ("saved_bytes", "forward_ns", "backward_ns", "forward_workspace_bytes", "backward_workspace_bytes")


def _single_option(given: dict[str, Any]) -> Option:
    missing = [field for field in _OPTION_FIELDS[:3] if given[field] is None]
    if missing:
        raise BadInput(f"a stage has options, or the fields of its only one; missing: {', '.join(missing)}")
    filled = {field: 0 if value is None else value for field, value in given.items()}
    saved, forward, backward, forward_workspace, backward_workspace = (filled[field] for field in _OPTION_FIELDS)
    return Option(saved, forward, backward, forward_workspace, backward_workspace)


@dataclass(frozen=True, init=False)
class Stage:
    """One stage of a chain: a block of the model, with one or several options.

    Give either ``options``, or the fields of its only option (``saved_bytes``, ``forward_ns``, ``backward_ns`` and the
    two workspaces), which is then named "keep". None means the default of the file format.

    Attributes
    ----------
    output_bytes
        The stage's output, bytes.
    options
        Its options, at least one; storing everything uses option 0.
    name
        A name for reports.
    grad_bytes
        Gradient of the output, bytes (default: ``output_bytes``).
    weight_grad_bytes
        Gradients of the stage's parameters that its backward adds to what is resident, bytes.
    no_recompute
        The forward must run exactly once, and save.
    forward_only_ns
        Time of a forward that saves nothing, nanoseconds (default: the first option's forward).
    forward_only_workspace_bytes
        Workspace of that forward, bytes (default: the first option's).
    """

    output_bytes: int
    options: tuple[Option, ...]
    name: str
    grad_bytes: int
    weight_grad_bytes: int
    no_recompute: bool
    forward_only_ns: int
    forward_only_workspace_bytes: int

    def __init__(
        self,
        output_bytes: int,
        options: Iterable[Option] | None = None,
        *,
        saved_bytes: int | None = None,
        forward_ns: int | None = None,
        backward_ns: int | None = None,
        forward_workspace_bytes: int | None = None,
        backward_workspace_bytes: int | None = None,
        name: str = "",
        grad_bytes: int | None = None,
        weight_grad_bytes: int = 0,
        no_recompute: bool = False,
        forward_only_ns: int | None = None,
        forward_only_workspace_bytes: int | None = None,
    ) -> None:
        given = dict(
            zip(
                _OPTION_FIELDS,
                (saved_bytes, forward_ns, backward_ns, forward_workspace_bytes, backward_workspace_bytes),
                strict=True,
            )
        )
        if options is None:
            ways: tuple[Option, ...] = (_single_option(given),)
        else:
            ways = tuple(list_of(options, Option, "options"))
            both = [field for field, value in given.items() if value is not None]
            if both:
                raise BadInput(f"a stage has options, or the fields of its only option; not options and {both[0]}")
            if not ways:
                raise BadInput("a stage has at least one option")
        first = ways[0]
        self._set("output_bytes", output_bytes)
        self._set("options", ways)
        self._set("name", name)
        self._set("grad_bytes", output_bytes if grad_bytes is None else grad_bytes)
        self._set("weight_grad_bytes", weight_grad_bytes)
        self._set("no_recompute", flag(no_recompute, "no_recompute"))
        self._set("forward_only_ns", first.forward_ns if forward_only_ns is None else forward_only_ns)
        self._set(
            "forward_only_workspace_bytes",
            first.forward_workspace_bytes if forward_only_workspace_bytes is None else forward_only_workspace_bytes,
        )
        normalize(
            self,
            output_bytes=0,
            grad_bytes=0,
            weight_grad_bytes=0,
            forward_only_ns=0,
            forward_only_workspace_bytes=None,
        )
        encoded(name, "name of a stage")

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    @property
    def saved_bytes(self) -> int:
        """Saved bytes of option 0."""
        return self.options[0].saved_bytes

    @property
    def forward_ns(self) -> int:
        """Forward time of option 0, nanoseconds."""
        return self.options[0].forward_ns

    @property
    def backward_ns(self) -> int:
        """Backward time of option 0, nanoseconds."""
        return self.options[0].backward_ns


def _option_struct(option: Option) -> _structs.StageOption:
    return _structs.StageOption(
        encoded(option.name, "name of an option"),
        option.saved_bytes,
        option.forward_ns,
        option.backward_ns,
        option.forward_workspace_bytes,
        option.backward_workspace_bytes,
    )


def _option_of(option: _structs.StageOption) -> Option:
    return Option(
        option.saved_bytes,
        option.forward_ns,
        option.backward_ns,
        option.forward_workspace_bytes,
        option.backward_workspace_bytes,
        text_of(option.name),
    )


def stage_struct(stage: Stage) -> _structs.Stage:
    return _structs.Stage(
        name=encoded(stage.name, "name of a stage"),
        output_bytes=stage.output_bytes,
        grad_bytes=stage.grad_bytes,
        weight_grad_bytes=stage.weight_grad_bytes,
        forward_only_ns=stage.forward_only_ns,
        forward_only_workspace_bytes=stage.forward_only_workspace_bytes,
        no_recompute=stage.no_recompute,
        option_count=len(stage.options),
        options=_structs.array_type(_structs.StageOption, len(stage.options))(*map(_option_struct, stage.options)),
    )


def stage_of(stage: _structs.Stage) -> Stage:
    return Stage(
        stage.output_bytes,
        [_option_of(stage.options[k]) for k in range(stage.option_count)],
        name=text_of(stage.name),
        grad_bytes=stage.grad_bytes,
        weight_grad_bytes=stage.weight_grad_bytes,
        no_recompute=stage.no_recompute,
        forward_only_ns=stage.forward_only_ns,
        forward_only_workspace_bytes=stage.forward_only_workspace_bytes,
    )
