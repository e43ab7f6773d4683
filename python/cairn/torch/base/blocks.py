"""Blocks: the pieces of a model that run as one stage each, and the interception of their calls.

A block is one module, or several consecutive children of an `nn.Sequential` that cannot be separated (an in-place
activation after the layer that it changes). Interception leaves the module's hooks, names and parameters unchanged:
`forward` is set on the instance, and removed afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .tree import tensors_in


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """One module, or the children [start, stop) of a Sequential."""

    name: str
    modules: tuple[nn.Module, ...]
    container: nn.Sequential | None = None  # None: `modules` is the one module itself
    start: int = 0
    borrowed: tuple[nn.Module, ...] = ()  # what it runs of the model, and is no part of it
    is_compiled: bool = False  # it runs what torch.compile has made, so it is only called, and not looked into
    has_gradients_inside: bool = False  # its forward has backwards of its own (autograd.grad)
    has_own_hooks: bool = False  # it has saved-tensor hooks of its own, which keep what it saves

    @property
    def stop(self) -> int:
        return self.start + len(self.modules)

    def all_modules(self) -> list[nn.Module]:
        """Its modules and all modules in them, as `BlockState` numbers them."""
        return [part for module in self.modules for part in module.modules()]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of its modules."""
        return (parameter for module in self.modules for parameter in module.parameters())

    @property
    def class_name(self) -> str:
        return "+".join(type(module).__name__ for module in self.modules)


class StepModule(nn.Module):
    """A module whose forward is a training step around its part `model`, and that is no block itself."""

    model: nn.Module


def root_of(model: nn.Module) -> nn.Module:
    """The outermost module that may be a block."""
    return model.model if isinstance(model, StepModule) else model


def resolve(model: nn.Module, name: str) -> Block:
    """The block of a stage's name.

    "" is the model itself, "features.3-5" the children 3 to 5 of the Sequential `features`.
    """
    prefix, _, last = name.rpartition(".")
    first, dash, end = last.partition("-")
    container = model.get_submodule(prefix)
    is_child = last in dict(container.named_children())  # a ModuleDict may have any names
    if is_child or not (dash and first.isdigit() and end.isdigit()):
        return Block(name, (model.get_submodule(name),))
    if not isinstance(container, nn.Sequential) or int(end) >= len(container):
        raise AttributeError(f"{prefix or 'the model'} is no Sequential with children {last}")
    return Block(name, tuple(container)[int(first) : int(end) + 1], container, int(first))


def takes_gradients(arguments: Any, parameters: Iterable[torch.Tensor | None]) -> bool:
    """Whether a run with these arguments has a backward. It then saves tensors, and is a stage.

    Other runs (recycling, self-conditioning, targets) are left unchanged.
    """
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in tensors_in(arguments)) or any(
        p is not None and p.requires_grad for p in parameters
    )


#: Called instead of a block: (block, what the block would have run, its arguments) -> the block's output.
Handler = Callable[[Block, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted(
    blocks: Sequence[Block], handler: Handler, around: Callable[[], Any] = contextlib.nullcontext
) -> Iterator[None]:
    """In the body, every call of a block that takes gradients goes to `handler`.

    All calls run within a context that `around` makes.
    """

    def handled(block: Block, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with around():
            if not takes_gradients((args, kwargs), block.parameters()):
                return function(*args, **kwargs)
            return handler(block, function, args, kwargs)

    patched: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in _replacements(blocks, handled):
            before = vars(module).get("forward")
            vars(module)["forward"] = forward
            patched.append((module, before))
        yield
    finally:
        for module, before in patched:
            del vars(module)["forward"]
            if before is not None:
                vars(module)["forward"] = before


def _replacements(blocks: Sequence[Block], handler: Handler) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    slices: dict[int, list[Block]] = {}
    for block in blocks:
        if block.container is None:
            yield block.modules[0], _patched(block, block.modules[0].forward, handler)
        else:
            slices.setdefault(id(block.container), []).append(block)
    for group in slices.values():
        container = group[0].container
        assert container is not None
        yield container, _sequential_forward(container, group, handler)


def _patched(block: Block, function: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return handler(block, function, args, kwargs)

    return forward


def _sequential_forward(container: nn.Sequential, blocks: Sequence[Block], handler: Handler) -> Callable[[Any], Any]:
    """A Sequential's forward in which each block is one call and the other children run unchanged."""
    by_start = {block.start: block for block in blocks}

    def forward(input: Any) -> Any:
        position = 0
        children = list(container)
        while position < len(children):
            block = by_start.get(position)
            if block is None:
                input = children[position](input)
                position += 1
            else:
                input = handler(block, _chain_of(block.modules), (input,), {})
                position = block.stop
        return input

    return forward


def _chain_of(modules: Sequence[nn.Module]) -> Callable[[Any], Any]:
    def run(input: Any) -> Any:
        for module in modules:
            input = module(input)
        return input

    return run


def checkpointing_switch(module: nn.Module) -> str:
    """The call that stops a module's layers from recomputing themselves; empty if they do not.

    The attributes are those of transformers, old and new, and of timm (open_clip has them, too).
    """
    if getattr(module, "gradient_checkpointing", False) or getattr(module, "activation_checkpointing", False) is True:
        return "model.gradient_checkpointing_disable()"
    return "model.set_grad_checkpointing(False)" if getattr(module, "grad_checkpointing", False) is True else ""
