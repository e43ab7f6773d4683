"""Training of PyTorch models inside a byte budget.

    import cairn.torch as ct

    model = ct.checkpoint(model, sample, budget="8GiB", loss_fn=...)   # then train as ever
    print(ct.report(model))

`profile` measures a step, `plan` finds its fastest schedule within the budget, `apply` runs the model that way;
`checkpoint` does all three. Loss, gradients, buffers and random state stay bit for bit those of the plain model.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("cairn.torch needs PyTorch 2.6 or later: pip install torch") from error

from .._budget import Budget
from .base.errors import (
    BudgetExceeded,
    InfeasibleBudget,
    PlanMismatch,
    RecomputationError,
    TierUnavailable,
    TorchError,
    TransferFailed,
    Unsupported,
    VerificationFailed,
)
from .base.stages import StageRef
from .batch_size import MaxBatch, max_batch
from .callbacks import trainer_callback
from .compiled.compiled_model import CompiledReport
from .compiled.compiled_plan import CompiledPlan
from .compiling import compile
from .front import budget, checkpoint, report
from .handle import Handle, apply, handle
from .outside.head import linear_cross_entropy
from .outside.loss import cross_entropy
from .plan import Plan, plan
from .profiler import profile
from .report import Report, explain
from .sequential import checkpoint_sequential
from .step_profile import Profile
from .sweep import Measurement, Point, Sweep, sweep
from .trace import Traced, trace
from .tracing.interpreter import Step
from .transfer.link import Link, measure_link
from .transfer.offload import Offload, offload
from .verification import Verification, verify

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CompiledPlan",
    "CompiledReport",
    "Handle",
    "InfeasibleBudget",
    "Link",
    "MaxBatch",
    "Measurement",
    "Offload",
    "Plan",
    "PlanMismatch",
    "Point",
    "Profile",
    "RecomputationError",
    "Report",
    "StageRef",
    "Step",
    "Sweep",
    "TierUnavailable",
    "TorchError",
    "Traced",
    "TransferFailed",
    "Unsupported",
    "Verification",
    "VerificationFailed",
    "apply",
    "budget",
    "checkpoint",
    "checkpoint_sequential",
    "compile",
    "cross_entropy",
    "explain",
    "handle",
    "linear_cross_entropy",
    "max_batch",
    "measure_link",
    "offload",
    "plan",
    "profile",
    "report",
    "sweep",
    "trace",
    "trainer_callback",
    "verify",
]
