"""Regions: compiled code in place of the forwards of a model's blocks, each compiled by itself.

A `Region` replaces the forward of one block and calls the compiled code of its option. Nothing else of the model
changes: there are no new names or wrappers, and autograd runs the step. A block that was compiled before
(`block.compile()`, `torch.compile(block)`) is compiled anew by its option, and restored when the region is removed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base import _compat
from ..base.blocks import Block
from ..base.patched_forward import PatchedForward
from .calls import compiled_call
from .partitions import Partitions, SavedPartition
from .region_code import BlockCode, call_module
from .region_levels import EVERYTHING, Level, level_text

_IN_PLACE = "_compiled_call_impl"  # what Module.compile sets


class Region(PatchedForward):
    """Replaces the forward of a block by compiled code.

    Attributes
    ----------
    name
        The name of the block.
    code
        The code of the block's class.
    option
        The number of the option that calls use.
    is_enabled
        If false, calls run the block's own forward.
    """

    carries_out_a_plan = False
    _torchdynamo_orig_callable = None  # torch's mark for compiled functions: no hooks are put inside of them

    def __init__(self, module: nn.Module, name: str, code: BlockCode, owner: object) -> None:
        self.name, self.code, self.option, self.is_enabled = name, code, 0, True
        compiled = _compat.compiled_inside(module)
        self._called_module = weakref.ref(module if compiled is None else compiled)
        super().__init__(module, _call_forward, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the block's forward."""
        call_module = self._called_module()
        if args and args[0] is self._module():
            args = args[1:]
        if not self.is_enabled or self._handler is None:
            return self.plain()(*args, **kwargs)
        code = self.code
        code.backend.option = self.option
        with compiled_call(f"the block '{self.name}'", lambda: code.backend.graphs):
            try:
                return code.compiled(call_module, *args, **kwargs)
            except _compat.capture_error():
                if code.has_graph_breaks:
                    raise
            code.allow_graph_breaks()
            return code.compiled(call_module, *args, **kwargs)

    def plain(self) -> Callable[..., Any]:
        """The block's own forward, not compiled."""
        call_module = self._called_module()
        return self.original() if call_module is None or call_module is self._module() else call_module


def _call_forward(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


class Regions:
    """The regions of a model, by the names of blocks.

    It has weak references to the model and the regions; each region owns it. `partitions` are the schedules of the
    regions' graphs.
    """

    def __init__(
        self, model: nn.Module, kernels: str, device: torch.device, loaded: Sequence[SavedPartition] = ()
    ) -> None:
        self._model, self._kernels, self._device = weakref.ref(model), kernels, device
        self.partitions = Partitions(loaded)
        self._codes: dict[Callable[..., Any], BlockCode] = {}
        self._regions: dict[str, weakref.ref[Region]] = {}
        _compat.skip_tracing_of("cairn")
        self._in_place: list[tuple[weakref.ref[nn.Module], Any]] = []

    def disable_in_place_compilation(self) -> None:
        """Disable in-place compilation of submodules until regions are removed."""
        model = self._model()
        for part in model.modules() if model is not None else ():
            if vars(part).get(_IN_PLACE) is not None:
                self._in_place.append((weakref.ref(part), vars(part)[_IN_PLACE]))
                vars(part)[_IN_PLACE] = None

    def install(self, modules: Sequence[nn.Module]) -> None:
        """Add regions to modules."""
        model = self._model()
        names = {} if model is None else {module: name for name, module in model.named_modules()}
        for module in modules:
            self._regions[names[module]] = weakref.ref(Region(module, names[module], self._code(module), self))

    def _code(self, module: nn.Module) -> BlockCode:
        """The code of a block's class; if the forward was replaced on the instance, code of its own."""
        compiled, key = _compat.compiled_inside(module), type(module).forward
        function: Callable[..., Any] = key
        if compiled is not None:
            function, key = call_module, type(compiled).forward
        elif "forward" in vars(module):
            function = key = _as_function(vars(module)["forward"])
        if key not in self._codes:
            self._codes[key] = BlockCode(function, self._kernels, self._device, self.partitions)
        return self._codes[key]

    @property
    def names(self) -> list[str]:
        """The blocks that are regions."""
        return list(self._regions)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are regions."""
        return [module for _, region in self.items() if (module := region.module) is not None]

    @property
    def codes(self) -> list[BlockCode]:
        """The code of all regions."""
        return list(self._codes.values())

    @property
    def compilations(self) -> int:
        """How many codes were made of captured graphs so far."""
        return sum(code.backend.compilations for code in self.codes)

    @property
    def graphs(self) -> int:
        """How many graphs Dynamo captured so far."""
        return sum(code.backend.graphs for code in self.codes)

    def get(self, name: str) -> Region | None:
        """The region of a block; None if there is none."""
        reference = self._regions.get(name)
        return None if reference is None else reference()

    def items(self) -> Iterator[tuple[str, Region]]:
        """The regions that still exist, by name."""
        for name in self._regions:
            region = self.get(name)
            if region is not None:
                yield name, region

    def schedules(self, levels: Mapping[str, Level]) -> tuple[SavedPartition, ...]:
        """The schedules of the regions' graphs at these levels, for a plan to store."""
        return self.partitions.at_levels(map(level_text, levels.values()))

    def set_levels(self, levels: Mapping[str, Level]) -> None:
        """Sets the option of each region by its level. Regions that are not named keep everything."""
        for name, region in self.items():
            region.option = region.code.backend.number_of(levels.get(name, EVERYTHING))

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the blocks' own forwards for the body of a with statement."""
        regions = [region for _, region in self.items()]
        for region in regions:
            region.is_enabled = False
        try:
            yield
        finally:
            for region in regions:
                region.is_enabled = True

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the model. If the body of a with statement fails, the regions are back, with their code."""
        before = [(name, region.module, region.code) for name, region in self.items()]
        self.remove()
        try:
            yield
        except BaseException:
            self.disable_in_place_compilation()
            for name, module, code in before:
                if module is not None:
                    self._regions[name] = weakref.ref(Region(module, name, code, self))
            raise

    def remove(self) -> None:
        """Restore the model."""
        for _, region in list(self.items()):
            region.remove()
        self._regions.clear()
        for reference, impl in self._in_place:
            part = reference()
            if part is not None:
                vars(part)[_IN_PLACE] = impl
        self._in_place.clear()


def modules_of(blocks: Sequence[Block]) -> list[nn.Module]:
    """The modules that become regions: children of a Sequential that are one block become one region, or one each."""
    modules: list[nn.Module] = []
    for block in blocks:
        whole = block.container if block.container is not None and len(block.modules) == len(block.container) else None
        modules += block.modules if whole is None else [whole]
    return modules


def _as_function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that was set on an instance, as a function of the module and its arguments."""

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return run
