"""`fit`: whether a training step fits into a device's memory, and the largest size that does. Nothing runs and no
weights exist: steps are captured with tensors that have shapes but no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rematplan.fitting.question import MakeOptimizer, Question, SizedModel, WithoutData, question, training
from rematplan.fitting.sizes import AtSize, LargestSizes, SizeSearch
from rematplan.ir import ModelError, TrainingGraph, UsageError
from rematplan.planner.auto.compile_kernels import compile_kernels
from rematplan.planner.core.plan import Plan, peak_op
from rematplan.planner.core.simulator import simulate
from rematplan.planner.core.strategy import Progress, Strategy, silent
from rematplan.planner.peak_report import ACTIVATIONS, GRADIENTS, WORKSPACE, peak_split
from rematplan.plans.step_problems import RESERVED
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.runtime.problem.loss_boundary import OPTIMIZER

STEPPING = "optimizer's temporaries"


@dataclass(frozen=True)
class Fit:
    """The answer of `fit`: whether a training step fits, what its memory consists of, and the largest size that fits.

    ``str`` of it is the verdict in one line.
    """

    name: str
    dimension: str
    memory: int
    """The memory that the step must fit into, in bytes."""
    here: AtSize
    """The size in question."""
    split: dict[str, dict[str, int]]
    """The bytes at the peak, by kind, ``without`` recomputation and ``planned``. They sum to the peak."""
    peak_at: dict[str, str]
    """By the same two names, the op at the peak; ``the end`` if the peak is not at an op."""
    margin: dict[str, int]
    """The margin's parts by where they come from, ``without`` recomputation."""
    largest: LargestSizes | None
    """The largest sizes that fit; None if they were not asked for, or if the model failed at another size."""
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the step fits, with a plan if necessary."""
        return self.here.fits

    @property
    def spare(self) -> int:
        """The bytes that are left without recomputation, or with the plan if they are negative without. Negative in
        both cases: the memory is too small."""
        without = self.memory - self.here.without
        return without if without >= 0 else self.memory - self.here.planned


def fit(
    make_model: Callable[[], nn.Module],
    make_inputs: Callable[[int], Sequence[torch.Tensor]],
    *,
    memory: str | int,
    size: int = 1,
    optimizer: str | MakeOptimizer | None = None,
    dtype: str | None = None,
    costs: str = "roofline",
    max_overhead: float | None = None,
    loss: str | None = None,
    strategy: str | Strategy | None = None,
    largest: bool = True,
    progress: Progress = silent,
) -> Fit:
    """Return whether a training step fits into a device's memory, without a plan and with one, and the largest size
    that fits. Nothing runs, and neither weights nor inputs are allocated.

    The step is the forward, the loss, the backward and the optimizer's step, with gradients that are set to None before
    it. The margin of a GPU's model consists of the rounding of PyTorch's allocator and of cuBLAS's workspaces.

    Args:
        make_model: creates the module. It runs on the meta device, so it must not read values of tensors.
        make_inputs: returns the inputs of the module's forward for a size, for example for a batch size.
        memory: bytes of the device, such as ``80GB`` or ``79GiB``.
        size: the size in question.
        optimizer: a function from the parameters to an optimizer, such as ``torch.optim.AdamW``, or the name of one of
            PyTorch's, such as ``adamw``. None: no optimizer is counted.
        dtype: ``fp32`` and ``bf16`` convert parameters and inputs; ``bf16-mixed`` runs the step in autocast. None:
            types are as made.
        costs: ``profile`` measures times and workspaces of ops on this machine, so that peaks are exact; the name of a
            device model, such as ``h100``, or a file, as for `plan_module`. A device model has no workspaces.
        max_overhead: the largest extra time of a plan, as a share of the step's time, such as 0.2. None: any.
        loss: as for `load_step`. A scalar output is the loss itself.
        strategy: searches for plans; None: `Auto`, a few seconds a size.
        largest: whether to search for the largest size that fits.
        progress: called with the fraction done (0 to 1) and a short text.

    Raises:
        UsageError: an argument is malformed or unknown.
        ModelError: the step cannot be captured.
    """
    asked = question(memory, optimizer, dtype, costs, max_overhead, strategy)

    def at(stated: int) -> WithoutData:
        module, inputs, mode = without_data(make_model, lambda: make_inputs(stated))
        return training(module, inputs, mode, asked, loss)

    name = getattr(make_model, "__name__", type(make_model).__name__)
    return answer(SizedModel(name, "size", size, at), asked, largest, progress)


def answer(model: SizedModel, asked: Question, largest: bool, progress: Progress = silent) -> Fit:
    """Return whether a model's training step fits, and if ``largest``, the largest size that fits. `UsageError` or
    `ModelError` if the model cannot be made or captured at the size in question."""
    compile_kernels(progress)  # before the seconds of searches count
    sizes = SizeSearch(model, asked, progress)
    progress(0.1, f"{model.dimension} {model.size}")
    here = sizes.row(model.size)
    rounded, exact = sizes.problem(model.size), sizes.exact(model.size)
    plans = {"without": sizes.base(model.size), "planned": sizes.plan(model.size)}
    split = {
        "without": _split(sizes.plain(rounded), sizes.plain(exact), plans["without"], asked),
        "planned": _split(rounded, exact, plans["planned"], asked),
    }
    found, notes = _largest(model, sizes) if largest else (None, ())
    rounding = split["without"]["margin"] - sum(asked.margin.values())
    margin = {"the allocator rounds the sizes of tensors up": rounding} if asked.accelerator else {}
    return Fit(
        model.name,
        model.dimension,
        asked.memory,
        here,
        split,
        {which: peak_op(plan) or "the end" for which, plan in plans.items()},
        {**asked.margin, **margin},
        found,
        notes,
    )


def _largest(model: SizedModel, sizes: SizeSearch) -> tuple[LargestSizes | None, tuple[str, ...]]:
    """Return the largest sizes that fit; or None and a note, if the model cannot be made or captured at another
    size."""
    try:
        return sizes.largest(), ()
    except (ModelError, UsageError) as error:
        return None, (f"no largest {model.dimension} is stated, since another one failed: {error}",)


def _split(graph: TrainingGraph, exact: TrainingGraph, plan: Plan, asked: Question) -> dict[str, int]:
    """Return the bytes at the peak of a plan by kind. The margin is what rounded sizes exceed exact ones by, and what
    libraries keep. ``graph``: the problem with rounded sizes. ``exact``: the same problem with exact ones."""
    at = simulate(graph, plan.schedule).peak_at
    found = peak_split(exact, plan.schedule, at)
    stepping = found.pop(WORKSPACE) if peak_op(plan) == OPTIMIZER else 0
    names = {
        "parameter": "parameters",
        GRADIENTS: "gradients",
        RESERVED: "optimizer state",
        ACTIVATIONS: "activations",
    }
    ordered = {name: found.pop(kind, 0) for kind, name in names.items()}
    ordered |= {
        WORKSPACE: found.pop(WORKSPACE, 0),
        STEPPING: stepping,
        **{k: n for k, n in found.items() if n},
    }
    peak = plan.estimate.peak + sum(asked.margin.values())
    return {**ordered, "margin": peak - sum(ordered.values())}
