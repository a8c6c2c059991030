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
    """Check, before a network is captured, that ``costs`` is ``roofline``, ``profile`` or the path of a readable
    profile file.

    Raises:
        UsageError: ``costs`` is none of these. The message lists the kinds, or says what is wrong with the file.
    """
    if not isinstance(costs, (str, Path)):
        raise UsageError(f"costs is {costs!r}; known: {', '.join(COSTS)}, and profile files (NAME.json)")
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
        costs: ``profile`` measures time and workspace of each distinct op on the present device; ``roofline``
            computes times from a model of the device ``device``, without workspaces; otherwise the path of a JSON
            file that ``rematplan profile`` wrote.
        device: the name of a device model; used only with ``roofline``.
        progress: called with the fraction done (0 to 1) and a short text; used only with ``profile``.
        max_inversion_error: the largest relative error that a tensor may have after inverses (ops that compute an
            input from an output) recover it; None: a limit that suits its type. See `with_anchors`.
        sized: costs that were measured at other sizes of the step; used only with ``profile``. Costs between two
            measured sizes are interpolated where possible. New measurements are added. None: all costs are measured.

    Raises:
        UsageError: ``costs`` or ``device`` is unknown, the profile lacks an op of the step, or
            ``max_inversion_error`` is not positive.
    """
    if costs == "profile":
        known = (SizedCosts() if sized is None else sized).costs(step, progress)
    elif costs == "roofline":
        known = roofline_costs(step, device_model(device))
    else:
        known = _profile(costs).costs(step)
    return with_anchors(training_graph(step, known), max_inversion_error)


def copies_priced(step: CapturedStep, graph: TrainingGraph, costs: str) -> Copies:
    """Return the memory that a backward needs in addition if the loss produces gradients of the outputs with other
    strides than at capture.

    Ops of the backward may then copy these gradients before they use them.

    Args:
        step: the captured step.
        graph: its planning problem.
        costs: ``profile`` measures the workspaces of the ops that read gradients with other strides; ``roofline``
            assumes workspaces of 0; for a profile file, each op is assumed to copy every argument whose strides
            differ.
    """

    def measured(other_strides: CapturedStep, names: Collection[str]) -> Mapping[str, int]:
        return {name: cost.workspace for name, cost in profile_costs(other_strides, only=names).items()}

    own = {op.name: op.workspace for op in graph.ops}
    copies = most_copied(step, own, measured if costs == "profile" else None)
    return replace(copies, workspace={}) if costs == "roofline" else copies
