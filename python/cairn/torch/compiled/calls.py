"""Calls of compiled code, of a model or of a block.

Dynamo may capture a graph in any call: for another shape, mode or attribute. So its settings hold around every call,
and its errors become `Unsupported` there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..base import _compat
from ..base.errors import Unsupported


@contextlib.contextmanager
def compiled_call(what: str, graphs: Callable[[], int], as_one_graph: str = "") -> Iterator[None]:
    """Context manager for a call of compiled code.

    Parameters
    ----------
    what
        The model or the block, for errors.
    graphs
        How many graphs were captured for it.
    as_one_graph
        Errors of the capture say that it must be one graph, and this remedy; empty where it may be several.
    """
    try:
        with _compat.capture_settings():
            yield
    except _compat.recompile_limit_error() as error:
        raise Unsupported(
            f"torch.compile reaches its limit of {_compat.MANY_GRAPHS} compilations of one function in {what} (graphs "
            f"captured: {graphs()}), and would run it without its plan. Every other shape, mode and attribute of a "
            "module is one more compilation: use fewer shapes, or tensors in place of attributes that differ; "
            "torch._dynamo.reset() discards what was compiled"
        ) from error
    except _compat.capture_error() as error:
        how = " as one graph" if as_one_graph else ""
        remedy = f", or {as_one_graph}" if as_one_graph else ""
        raise Unsupported(
            f"torch.compile cannot capture {what}{how}: {error}\nSplit or change the operation that it names{remedy}"
        ) from error
