"""`Budget`: a budget as the user states it, before any device is known."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory that a training step may use.

    Attributes
    ----------
    total
        Device memory: bytes, a size such as "8GiB", a share of the device's memory such as "80%", or "auto"
        (what is free on the device).
    host
        Host memory for offloaded tensors: bytes or a size; "auto" leaves it to the plan's `host_budget`.
    reserve
        Bytes of `total` that the plan leaves free; None lets the profile decide.
    """

    total: int | str = "auto"
    host: int | str = "auto"
    reserve: int | str | None = None
