"""Training of PyTorch models inside a byte budget.

    import cairn.torch as ct

    model = ct.checkpoint(model, sample, budget="8GiB", loss_fn=...)   # then train as before
    print(ct.report(model))

`profile` measures a step, `plan` finds its fastest schedule within the budget, `apply` makes the model follow that
plan. `checkpoint` does all three. Loss, gradients, buffers and random state stay bit for bit those of the plain model.
"""

from __future__ import annotations

import cairn as _cairn

if not hasattr(_cairn, "get_library"):
    raise ImportError(
        f"cairn.torch belongs to the distribution cairn-budget, but {_cairn.__file__} is another project's package "
        "(the distribution cairn): pip uninstall cairn; pip install --force-reinstall cairn-budget"
    )

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("cairn.torch needs PyTorch 2.6 or later: pip install torch") from error

from .._budget import Budget
from .api import budget, checkpoint, report
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
from .compiled.region_plan import RegionPlan
from .compiling import compile
from .estimation.devices import DeviceModel
from .estimation.estimate import estimate
from .estimation.result import Estimate, EstimatePoint
from .evaluation.sweep import sweep
from .evaluation.sweep_data import Measurement, Point, Sweep
from .evaluation.verification import Verification, verify
from .handle import Handle, apply, handle
from .head.head import linear_cross_entropy
from .head.loss import cross_entropy
from .offloading.link import Link, measure_link
from .offloading.offload import Offload, offload
from .planning.plan import Plan
from .planning.step_profile import Profile
from .planning.task import plan
from .profiler import profile
from .reporting.report import Report, explain
from .sequential import checkpoint_sequential
from .trace import Traced, trace
from .tracing.interpreter import Step

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CompiledPlan",
    "CompiledReport",
    "DeviceModel",
    "Estimate",
    "EstimatePoint",
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
    "RegionPlan",
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
    "estimate",
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
