"""The names among which options of the public calls choose, shared by all that read them."""

from __future__ import annotations

#: Which kind of step a plan is for: gradients exist when it begins and are added to, or the step creates them.
ACCUMULATED, CREATED = "accumulated", "created"

#: What a budget limits: the whole step, or activations alone.
SCOPES = ("step", "activations")

#: How a plan may save memory.
ALLOWED = ("recompute", "inside", "offload")

#: What is done where inputs have other shapes than those that were profiled.
POLICIES = ("replan", "error", "nearest")

#: How recomputed blocks are compared with their first runs.
DETERMINISM_CHECKS = ("default", "values", "none")
