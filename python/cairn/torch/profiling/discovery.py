"""Chooses the blocks of a model, from the module calls of the sample step in their order.

The model runs once on the sample while nothing is saved for a backward. Every module call is recorded with the
storages that it read and returned, so skipped and shared layers and repeated calls are known. Blocks are the first of
these that exist: modules that the user names; gradient-checkpointing layers of Hugging Face; children of `Sequential`
and `ModuleList`, or modules that do more than such a child; the model's own children as they were called; the whole
model.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from torch import nn

from ..base import _compat
from ..base.blocks import Block, root_of
from ..base.errors import Unsupported
from ..rerun_state.sharded import whole_units
from .call_trace import Trace, runs_of


def skipped_layers(model: nn.Module, observed: Trace) -> list[str]:
    """Modules of a list that did not run, while others of the same list did."""
    called = {id(call.module) for call in observed.calls}
    skipped = []
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and any(id(child) in called for child in part):
            skipped += [f"{name}.{key}" for key, child in part.named_children() if id(child) not in called]
    return skipped


def modules_that_skip(model: nn.Module, observed: Trace) -> list[str]:
    """Modules that did not call a submodule which others of their class called, as with a dropped residual branch."""
    called = {id(call.module) for call in observed.calls}
    ran = [(name, module) for name, module in model.named_modules() if id(module) in called]
    parts: collections.defaultdict[type, set[str]] = collections.defaultdict(set)
    for _, module in ran:
        parts[type(module)].update(key for key, child in module.named_children() if id(child) in called)

    def lacks_one(module: nn.Module) -> bool:
        return any(key in parts[type(module)] and id(child) not in called for key, child in module.named_children())

    return [name for name, module in ran if lacks_one(module)]


# -- choosing ------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, observed: Trace, wanted: Any) -> list[Block]:
    """The blocks of a model, in the order of their first calls. `wanted` is described at `cairn.torch.profile`."""
    modules = _automatic(model, observed) if wanted == "auto" else named_by_user(model, wanted)
    if not modules:
        raise ValueError(f"blocks={wanted!r} names no module of this {type(model).__name__}")
    modules = _with_their_backwards(observed, modules, named=wanted != "auto")
    return _in_call_order(model, observed, whole_units(model, modules, named=wanted != "auto"))


def _with_their_backwards(observed: Trace, modules: list[nn.Module], named: bool) -> list[nn.Module]:
    """Replace modules whose backward runs before the forward has ended by the module that contains this backward."""
    around = list(dict.fromkeys(call.module for call in observed.calls if call.has_gradients_inside))
    parts = {id(part): module for module in around for part in module.modules() if part is not module}
    inner = next((module for module in modules if id(module) in parts), None)
    if named and inner is not None:
        raise Unsupported(
            f"blocks= names a {type(inner).__name__} in a {type(parts[id(inner)]).__name__} whose forward takes "
            "gradients (autograd.grad): that one is a block as a whole, of which a part is kept; name it, or leave "
            "blocks= out"
        )
    return modules if named else [*(module for module in modules if id(module) not in parts), *around]


def whole_if_better(model: nn.Module, observed: Trace, blocks: Sequence[Block], room_bytes: int) -> list[Block]:
    """The whole model as one block, if selective recomputation of it is worth more than the chosen blocks; else none.

    That is so if the model itself computes more than its blocks do. It does not apply if the layers support gradient
    checkpointing, if some were skipped (one block could not show that), if code in the model is compiled and cannot be
    recorded, or if the device has not twice the memory of all saved tensors.
    """
    whole = root_of(model)
    modules = [module for block in blocks for module in block.modules]
    by_hand = not _hugging_face_layers(model, observed) and not skipped_layers(model, observed)
    fits = 2 * observed.saved_bytes([whole]) <= room_bytes
    if fits and by_hand and not observed.compiled and _is_mostly_between(whole, modules, observed):
        return _in_call_order(model, observed, [whole])
    return []


def named_by_user(model: nn.Module, wanted: Any, option: str = "blocks") -> list[nn.Module]:
    """The modules selected by name patterns, classes, modules, or lists of these.

    In a pattern, `*` matches within one component of a name. A container given by itself selects its children.
    """
    if isinstance(wanted, (nn.ModuleList, nn.Sequential)):
        return list(wanted)
    if isinstance(wanted, str):
        named = [m for name, m in model.named_modules() if _matches(name, wanted)]
    elif isinstance(wanted, type):
        named = [m for m in model.modules() if isinstance(m, wanted)]
    elif isinstance(wanted, nn.Module):
        named = [wanted]
    elif isinstance(wanted, Iterable):
        items = [[item] if isinstance(item, nn.Sequential) else named_by_user(model, item, option) for item in wanted]
        named = [module for item in items for module in item]
    else:
        raise TypeError(
            f"{option} must be a name pattern, a module class, modules or a list of these, not {type(wanted).__name__}"
        )
    return [part for m in named for part in (m if isinstance(m, nn.ModuleList) else [m])]


def _matches(name: str, pattern: str) -> bool:
    """The model itself, whose name is empty, is selected only by an empty pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return bool(name) == bool(pattern) and len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _automatic(model: nn.Module, observed: Trace) -> list[nn.Module]:
    for strategy in (_hugging_face_layers, _container_children, _top_level_calls):
        modules = _outermost(strategy(model, observed))
        if modules:
            return modules
    return [root_of(model)]


def _hugging_face_layers(model: nn.Module, observed: Trace) -> list[nn.Module]:
    layers = sys.modules.get("transformers.modeling_layers")
    layer_class = getattr(layers, "GradientCheckpointingLayer", None)
    if layer_class is None:
        return []
    called = {id(call.module) for call in observed.calls}
    return [
        module
        for module in model.modules()
        if id(module) in called and isinstance(_compat.compiled_inside(module) or module, layer_class)
    ]


def _container_children(model: nn.Module, observed: Trace) -> list[nn.Module]:
    """Children of the outermost containers; a child that is little more than a container is replaced by its own."""
    blocks = list(_in_containers(model, {id(call.module) for call in observed.calls}, observed))
    return blocks if sum(len(observed.calls_of(module)) for module in blocks) > 1 else []


def _in_containers(module: nn.Module, called: Set[int], observed: Trace) -> Iterator[nn.Module]:
    if _compat.compiled_inside(module) is not None:
        return
    if _is_container(module) or _repeats_its_child(module, observed):
        yield from _expanded(module, called, observed)
        return
    containers = [(child, list(_in_containers(child, called, observed))) for child in module.children()]
    whole = {id(child) for child, parts in containers if parts and _is_mostly_between(child, parts, observed)}
    for child, parts in containers:
        if parts and id(child) not in whole:
            yield from parts
        elif whole and id(child) in called:
            yield child  # a sibling of modules that contain such a container


HALF = 0.52  # a half, and the small tensors that normalizations save in addition to their inputs


def _is_mostly_between(module: nn.Module, children: Sequence[nn.Module], observed: Trace) -> bool:
    """Whether a module can be a block, and recomputing these submodules restores less than half of its saved bytes.

    Examples are a residual block whose container is only a projection, or layers with functions between them.
    """
    return observed.freed_bytes(children) < HALF * observed.freed_bytes([module]) and _can_be_stage(
        observed, Block("", (module,))
    )


def _expanded(container: nn.Module, called: Set[int], observed: Trace) -> Iterator[nn.Module]:
    for child in container.children():
        inner = child if _is_container(child) else _all_but(child, observed)
        if inner is not None and len([part for part in inner.children() if id(part) in called]) > 1:
            yield from _expanded(inner, called, observed)
        elif id(child) in called:
            yield child


def _repeats_its_child(module: nn.Module, observed: Trace) -> bool:
    """Whether a list has one child that runs several times, as in models that share one layer's parameters."""
    return isinstance(module, nn.ModuleList) and len(module) == 1 and len(observed.calls_of(module[0])) > 1


def _is_container(module: nn.Module) -> bool:
    """A list of several children; a Sequential with a forward of its own may do more than call them in order."""
    if isinstance(module, nn.Sequential):
        return len(module) > 1 and _is_plain(module)
    return isinstance(module, nn.ModuleList) and len(module) > 1


def _is_plain(container: nn.Sequential) -> bool:
    return type(container).forward is nn.Sequential.forward and "forward" not in vars(container)


ALL_BUT = 0.9  # of a module's parameters


def _all_but(module: nn.Module, observed: Trace) -> nn.Module | None:
    """The container that makes up a module: it has nearly all parameters, and its last child returns the result."""
    if _compat.compiled_inside(module) is not None:
        return None
    total = sum(p.numel() for p in module.parameters())
    for part in module.modules():
        if part is not module and _is_container(part):
            share = sum(p.numel() for p in part.parameters())
            last = observed.calls_of(list(part.children())[-1])
            calls = list(zip(observed.calls_of(module), last, strict=False))
            hands_on = bool(calls) and all(outer.returns & inner.returns for outer, inner in calls)
            return part if total and share >= ALL_BUT * total and hands_on else None
    return None


def _top_level_calls(model: nn.Module, observed: Trace) -> list[nn.Module]:
    """The calls at the first depth at which there are several."""
    for depth in range(1, max((call.depth for call in observed.calls), default=0) + 1):
        modules = [call.module for call in observed.calls if call.depth == depth and call.output_requires_grad]
        if len(modules) > 1:
            return modules
    return []


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Remove modules that are inside another module of the list."""
    chosen = {id(m) for m in modules}
    inner = {id(part) for m in modules for part in m.modules() if part is not m}
    return [m for m in dict.fromkeys(modules) if id(m) in chosen - inner]


def _in_call_order(model: nn.Module, observed: Trace, modules: Sequence[nn.Module]) -> list[Block]:
    outermost = {id(m): m for m in _outermost(modules)}
    merged = _merged_children(model, observed, outermost)
    blocks: list[Block] = []
    seen = {id(module) for block in merged.values() for module in block.modules[1:]}
    for call in observed.calls:
        if id(call.module) not in outermost or id(call.module) in seen:
            continue
        block = merged.get(id(call.module)) or Block(call.name, (call.module,))
        borrowed, compiled = tuple(observed.run_by(block.modules)), observed.runs_compiled(block.modules)
        inside = any(call.has_gradients_inside for part in block.all_modules() for call in observed.calls_of(part))
        block = dataclasses.replace(block, borrowed=borrowed, is_compiled=compiled, has_gradients_inside=inside)
        seen.update(id(m) for m in block.modules)
        _refuse_checkpoints(observed, block)
        _refuse_functional(observed, block)
        if _can_be_stage(observed, block):
            _refuse_hooks(observed, block)
            blocks.append(block)
    return blocks


def _refuse_checkpoints(observed: Trace, block: Block) -> None:
    """Refuse reentrant checkpoints (use_reentrant=True) around a block: the forward records no graph for it."""
    first = block.modules[0]
    if any(call.is_reentrant for call in observed.calls_of(first)) and any(p.requires_grad for p in first.parameters()):
        raise Unsupported(
            f"the model's forward calls '{block.name}' within torch.utils.checkpoint with use_reentrant=True: take it "
            "out, and the budget decides which blocks are recomputed; or name the modules around it with blocks="
        )


def _refuse_functional(observed: Trace, block: Block) -> None:
    """Refuse blocks in function transforms, which a recomputation would not have, and blocks with computed weights."""
    calls = [call for run in observed.runs_of(block.modules) for call in run]
    if any(call.is_transformed for call in calls):
        raise Unsupported(
            f"the model's forward calls '{block.name}' within a transform of torch.func (vmap, ...): name the modules "
            "around it with blocks="
        )
    if any(call.has_computed_weights for call in calls):
        raise Unsupported(
            f"the model's forward calls '{block.name}' with weights that it has computed (torch.func.functional_call): "
            "plan the module that functional_call is given, by itself, or name the modules around it with blocks="
        )


def _refuse_hooks(observed: Trace, block: Block) -> None:
    """Refuse saved-tensor hooks around blocks: torch calls only the innermost hooks."""
    if any(run[0].has_hooks for run in observed.runs_of(block.modules)):
        raise Unsupported(
            f"the model's forward calls '{block.name}' within saved-tensor hooks of its own (torch.utils.checkpoint, "
            "save_on_cpu, ...): take them out, and the budget decides which blocks are recomputed; or name the modules "
            "around them with blocks="
        )


def _can_be_stage(observed: Trace, block: Block) -> bool:
    """Whether a module can be a block: it has a backward, and returns no argument changed in place or viewed."""
    runs = observed.runs_of(block.modules)
    return bool(runs) and all(
        end.output_requires_grad and not begin.wrote_input and not (end.returns and end.returns <= begin.reads)
        for begin, end in ((calls[0], calls[-1]) for calls in runs)
    )


def _merged_children(model: nn.Module, observed: Trace, chosen: dict[int, nn.Module]) -> dict[int, Block]:
    """Groups of a Sequential's children in which each is merged with its predecessor, by id of the first module.

    A child may be in several groups, as an activation that all layers share. The first module identifies a block, so it
    is in no other group.
    """
    groups: list[Block] = []
    for prefix, container in model.named_modules():
        if not (isinstance(container, nn.Sequential) and _is_plain(container)):
            continue
        for start, group in _runs(observed, list(container), chosen):
            if len(group) > 1:
                name = f"{prefix}.{start}" if prefix else str(start)
                groups.append(Block(f"{name}-{start + len(group) - 1}", tuple(group), container, start))
    members = collections.Counter(id(module) for block in groups for module in block.modules)
    return {id(block.modules[0]): block for block in groups if members[id(block.modules[0])] == 1}


def _runs(
    observed: Trace, children: Sequence[nn.Module], chosen: dict[int, nn.Module]
) -> Iterator[tuple[int, list[nn.Module]]]:
    start, group = 0, [children[0]] if children else []
    for position, child in enumerate(children[1:], 1):
        if id(child) in chosen and id(group[-1]) in chosen and _belongs_to(observed, group, child):
            group.append(child)
        else:
            yield start, group
            start, group = position, [child]
    if group:
        yield start, group


def _belongs_to(observed: Trace, group: Sequence[nn.Module], module: nn.Module) -> bool:
    """Whether a child is merged with its predecessor: it writes to its output in place, or alone holds that output.

    In the first case it cannot run apart. In the second case neither saves the tensor between them, and a stage that
    ended there would count it as saved. Two modules with submodules of their own are worth more apart.
    """
    calls = [(first, second) for *_, first, second in runs_of(observed, [*group, module])]
    if not calls or module in group:
        return False
    if any(call.wrote_input or call.returns & call.reads for _, call in calls):
        return True
    is_small = not all(any(part.children()) for part in (group[-1], module))
    return is_small and all(not first.returns & (first.saves | second.saves) for first, second in calls)
