"""The costs of a captured step's ops: measured on this device, read from a profile file, or modelled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.core.inversion_error import with_anchors
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.sized_costs import SizedCosts
from rematplan.runtime.costs.device_models import (
    DEFAULT_DEVICE_MODEL,
    KNOWN_COSTS,
    PROFILE,
    ROOFLINE,
    DeviceModel,
    check_costs,
    device_model,
)
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.costs.profile_json import Profile, is_profile, read_profile
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.layout_copies import Copies, most_copied
from rematplan.runtime.problem.planning_problem import training_graph

Known: TypeAlias = Literal["profile"] | DeviceModel | Profile


def known_costs(costs: str) -> Known:
    """Return what ``costs`` names: ``profile`` itself, a device model, or the profile or device model in a file
    ``NAME.json``. `UsageError` for an unknown name, or a file that cannot be read."""
    if costs == PROFILE:
        return "profile"
    if not isinstance(costs, (str, Path)):
        raise UsageError(f"costs is {costs!r}; {KNOWN_COSTS}")
    name = str(costs)
    check_costs(name)
    if name == ROOFLINE:
        return device_model(DEFAULT_DEVICE_MODEL)
    if name.endswith(".json") and is_profile(Path(name)):
        return read_profile(Path(name))
    return device_model(name)


def priced(
    step: CapturedStep,
    costs: str,
    progress: Progress = silent,
    max_inversion_error: float | None = None,
    sized: SizedCosts | None = None,
) -> TrainingGraph:
    """Return the planning problem of a captured step, with microseconds and workspace bytes of each op as ``costs``
    names them. ``sized`` remembers measured costs between calls (None: they are measured anew). Inverses of tensors
    whose predicted relative error exceeds ``max_inversion_error`` (None: the usual limit) are left out. `UsageError`
    for unknown ``costs``."""
    found: Mapping[str, CallCost]
    match known_costs(costs):
        case DeviceModel() as device:
            found = roofline_costs(step, device)
        case Profile() as profile:
            found = profile.costs(step)
        case _:
            found = (SizedCosts() if sized is None else sized).costs(step, progress)
    return with_anchors(training_graph(step, found), max_inversion_error)


def copies_priced(step: CapturedStep, graph: TrainingGraph, costs: str) -> Copies:
    """Return the memory to copy the outputs' gradients if a loss gives them other strides than at capture. With a
    device model, workspaces are left out."""

    def measured(other_strides: CapturedStep, names: Collection[str]) -> Mapping[str, int]:
        return {name: cost.workspace for name, cost in profile_costs(other_strides, only=names).items()}

    own = {op.name: op.workspace for op in graph.ops}
    known = known_costs(costs)
    copies = most_copied(step, own, measured if known == PROFILE else None)
    return replace(copies, workspace={}) if isinstance(known, DeviceModel) else copies
