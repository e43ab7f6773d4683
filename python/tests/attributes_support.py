"""What tests of module state share: blocks with side effects."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


UNLIMITED = 2**40


class Keeping:
    """An object with a state of its own, and another one behind it."""

    def __init__(self, depth: int = 1) -> None:
        self.seen, self.number, self.table = [], 0, {"runs": 0}
        self.next = Keeping(depth - 1) if depth else None
