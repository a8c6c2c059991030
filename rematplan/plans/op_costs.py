"""The costs of a captured step's ops: measured on this device, read from a profile file, or modelled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.core.inversion_error import with_anchors
from rematplan.planner.core.strategy import Progress, silent
from rematplan.plans.sized_costs import SizedCosts
from rematplan.runtime.costs.device_models import DEFAULT_DEVICE_MODEL, device_model
from rematplan.runtime.costs.profile import profile_costs
from rematplan.runtime.costs.profile_json import Profile, read_profile
from rematplan.runtime.costs.roofline import roofline_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.layout_copies import Copies, most_copied
from rematplan.runtime.problem.planning_problem import training_graph

COSTS = ("roofline", "profile")


def check_costs(costs: str) -> None:
    """Check that ``costs`` is ``roofline``, ``profile`` or a readable profile file, before a network is captured.

    Raises:
        UsageError: it is not. The message lists the kinds, or says what is wrong with the file.
    """
    if costs not in COSTS:
        _profile(costs)


def _profile(costs: str) -> Profile:
    if Path(costs).suffix != ".json":
        raise UsageError(f"unknown costs {costs!r}; known: {', '.join(COSTS)}, and profile files (NAME.json)")
    return read_profile(Path(costs))


def priced(
    step: CapturedStep,
    costs: str,
    device: str = DEFAULT_DEVICE_MODEL,
    progress: Progress = silent,
    max_inversion_error: float | None = None,
    sized: SizedCosts | None = None,
) -> TrainingGraph:
    """Return the planning problem of a captured step, with a cost in microseconds and a workspace in bytes for each
    op.

    Args:
        step: the captured step.
        costs: ``roofline`` models the costs for the device model ``device``, without workspaces; ``profile`` measures
            time and workspace of each distinct op on the present device; the path of a file that ``rematplan
            profile`` wrote takes them from there.
        device: the name of a device model.
        progress: called with the fraction done and a short text.
        max_inversion_error: the largest relative error that a tensor may have after it is recovered by inverses (see
            `with_anchors`); by default one that suits its type.
        sized: costs that were measured for other sizes of steps, which spare measurements; gets those that are made.

    Raises:
        UsageError: unknown costs or device model, a profile that lacks an op of the step, or an error that is not
            positive.
    """
    if costs == "profile":
        known = (SizedCosts() if sized is None else sized).costs(step, progress)
    elif costs == "roofline":
        known = roofline_costs(step, device_model(device))
    else:
        known = _profile(costs).costs(step)
    return with_anchors(training_graph(step, known), max_inversion_error)


def copies_priced(step: CapturedStep, graph: TrainingGraph, costs: str) -> Copies:
    """Return the memory that the step needs in addition if gradients of its outputs arrive in another layout.

    ``costs``: as for `priced`. With ``profile`` the workspaces are measured; with ``roofline`` there are none;
    with a file each call is assumed to copy every argument whose strides differ.
    """

    def measured(lying: CapturedStep, names: Collection[str]) -> Mapping[str, int]:
        return {name: cost.workspace for name, cost in profile_costs(lying, only=names).items()}

    own = {op.name: op.workspace for op in graph.ops}
    copies = most_copied(step, own, measured if costs == "profile" else None)
    return replace(copies, workspace={}) if costs == "roofline" else copies
