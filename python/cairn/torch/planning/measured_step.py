"""The measurement of a step under a plan."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured step. Bytes of the peak include all that is resident; `gradients_existed` when it began.

    `dropped_bytes` of the model's output were gone when the backward ended.
    """

    peak_bytes: int
    step_ns: int
    gradients_existed: bool
    dropped_bytes: int = 0
