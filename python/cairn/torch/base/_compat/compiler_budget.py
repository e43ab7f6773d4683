"""torch.compile's own memory budget, and its backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

MANY_GRAPHS = 256  # of one function; torch gives up after a few, and then runs it as it is


@contextlib.contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """Graphs that are compiled in the body keep at most this share of the tensors that the partitioner would keep."""
    from torch._dynamo import config as compiling
    from torch._functorch import config as partitioning

    with partitioning.patch(activation_memory_budget=share), compiling.patch(many_graphs()):
        yield


def many_graphs() -> dict[str, int]:
    """The setting of Dynamo that lets one function be compiled many times."""
    from torch._dynamo import config

    return {"recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit": MANY_GRAPHS}


def own_backend(name: str) -> Callable[..., Any]:
    """A backend of torch.compile with an identity of its own, so that its compiled code is not shared with others."""

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(name)(graph, inputs, **options)

    return compile_graph
