"""Measure inversion: memory by depth, errors against their predictions, and all strategies side by side.

    python benchmarks/reversible.py [--quick] [--overlap | --compare]

The networks are chains of additive couplings whose functions have two layers (GELU), with 128 features per half, on
the CPU. Peaks come from the allocator, above the bytes held at the step's start and without the gradients, which
every step holds at its end. Errors are relative (L2): the largest error of a recovered tensor, compared with the true
one; and that of all gradients as one vector, compared with plain autograd.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rematplan.cli.run_command import run as command
from rematplan.ir import TrainingGraph, show_bytes
from rematplan.module.verification import run_once
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.lane_schedule import Sharing, place
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.overlap.place_on_lanes import on_two_lanes, saved
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.op_costs import priced
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import interleaved_seconds, peak_above_entry
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.execute.lane_speed import measured_sharing
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.inversion.find_inverses import is_exact, with_inverses
from rematplan.runtime.problem.loss_boundary import with_loss_boundary

WIDTH, ROWS = 128, 256


class Chain(nn.Module):
    """A chain of ``depth`` additive couplings, (``gamma`` · a + F(b), ``gamma`` · b + G(…)), and a mean square loss."""

    def __init__(self, depth: int, gamma: float = 1.0) -> None:
        super().__init__()
        self.gamma = gamma
        self.functions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2 * depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output, for ``x`` (rows, 2 · `WIDTH`)."""
        a, b = x.chunk(2, -1)
        for f, g in zip(self.functions[::2], self.functions[1::2], strict=True):
            a = self.gamma * a + f(b) if self.gamma != 1 else a + f(b)
            b = self.gamma * b + g(a) if self.gamma != 1 else b + g(a)
        return torch.cat([a, b], -1).square().mean()


class Residual(Chain):
    """As many ordinary residual blocks as a `Chain` of ``depth`` couplings has functions; they cannot be inverted."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output. Only the first half of the features of ``x`` is used."""
        a = x.chunk(2, -1)[0]
        for f in self.functions:
            a = a + f(a)
        return a.square().mean()


class Recorder:
    """An inverse op that also appends the relative error of its result to a list.

    ``call``: the inverse. ``truth``: the right result. ``errors``: the list.
    """

    def __init__(self, call: Call, truth: Tensor, errors: list[float]) -> None:
        self.call, self.truth, self.errors = call, truth, errors

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run the inverse, append the error of its result to ``errors``, and return the result."""
        found: Tensor = self.call.target(*tensors)
        self.errors.append(relative(found, self.truth))
        return found

    def __str__(self) -> str:
        return f"recorded.{self.call.name}"


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the L2 distance of ``found`` from ``truth``, ÷ the norm of ``truth``."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-300))


def inverted(model: nn.Module, x: Tensor, limit: float | None = 1e9) -> tuple[CapturedStep, Any, Plan]:
    """Return the captured step with its inverses, its planning problem, and the plan with the smallest peak.

    ``limit``: the largest predicted relative error of a recovered tensor, which anchors (stored tensors) enforce; 10⁹
    means no anchors, None a limit that suits the type.
    """
    step = with_inverses(capture(model, (x,), "couplings"), named_tensors(model)).step
    graph = with_loss_boundary(step, priced(step, "roofline", max_inversion_error=limit))
    return step, graph, Reversible().curve(graph, ())[-1]


def planned_step(model: nn.Module, step: CapturedStep, plan: Plan) -> Callable[[Tensor], Tensor]:
    """Return a function of the batch that runs the step by the plan, backward included, and returns the loss."""
    compiled = CompiledPlan(step, plan.schedule, plan.lanes)

    def loss(x: Tensor) -> Tensor:
        return compiled(named_tensors(model), (x,))[0]

    return lambda x: run_once(loss, (x,))


def true_values(model: nn.Module, step: CapturedStep, x: Tensor) -> dict[str, Tensor]:
    """Return every value of a step's forward, by name, computed without recomputation and inverses."""
    named = named_tensors(model)
    pools: dict[str, Callable[[Any], Tensor]] = {
        "parameter": lambda i: named[i.target].detach(),
        "batch": lambda i: x,
        "constant": lambda i: step.constants[i.value],
    }
    values = {i.value: pools[i.kind](i) for i in step.inputs if i.kind in pools}
    with torch.no_grad():
        for call in step.calls:
            if not call.backward:
                args = substitute(call.args, values.__getitem__)
                found = call.target(*args, **substitute(call.kwargs, values.__getitem__))
                for name, tensor in zip(call.results, (found,) if call.single else found, strict=True):
                    values |= {name: tensor} if name else {}
    return values


def errors_of(model: nn.Module, step: CapturedStep, plan: Plan, x: Tensor) -> tuple[float, float]:
    """Run a step by a plan. Return the largest relative error of a recovered tensor, and that of all gradients as one
    vector.

    ``x``: the step's batch.
    """
    truth, errors = true_values(model, step, x), [0.0]
    recorded = tuple(
        c if is_exact(c) else replace(c, target=Recorder(c, truth[c.results[0] or ""], errors))
        for c in step.inverses
    )
    model.zero_grad()
    run_once(model, (x,))
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    planned_step(model, replace(step, inverses=recorded), plan)(x)
    found = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return max(errors), relative(found, expected)


def memory(depths: tuple[int, ...]) -> None:
    """Print the activation memory, measured and predicted, of storing all and of inverting, for each number of
    blocks."""
    print("\nActivations at the peak, measured (predicted), by depth")
    for depth in depths:
        torch.manual_seed(0)
        model, x = Chain(depth), torch.randn(ROWS, 2 * WIDTH)
        step, graph, plan = inverted(model, x)
        gradients = sum(p.nbytes for p in model.parameters())
        rows: list[str] = []
        for one in (no_recompute(graph), plan):
            planned = planned_step(model, step, one)
            peak = _peak(model, lambda planned=planned, x=x: planned(x)) - gradients
            outputs = sum(graph.size[t] for t in graph.outputs)
            predicted = one.estimate.peak - graph.input_bytes - outputs
            rows.append(f"{show_bytes(peak)} ({show_bytes(predicted)})")
        print(f"  {depth:4d} blocks: store all {rows[0]:>26}   reversible {rows[1]:>26}   "
              f"extra time predicted {100 * plan.estimate.overhead:.1f} %")  # fmt: skip


def _peak(model: nn.Module, run: Callable[[], Any]) -> int:
    model.zero_grad(set_to_none=True)
    run()
    model.zero_grad(set_to_none=True)
    return peak_above_entry(run, torch.device("cpu"))[0]


def errors(depths: tuple[int, ...]) -> None:
    """Print the predicted and measured error of recovered tensors, and the gradients' error, by type and number of
    blocks."""
    print("\nError of what is brought back: predicted, measured, their ratio; error of the gradients")
    for dtype, gamma in (
        (torch.float64, 1.0),
        (torch.float32, 1.0),
        (torch.bfloat16, 1.0),
        (torch.float32, 0.9),
    ):
        for depth in depths:
            torch.manual_seed(0)
            model, x = Chain(depth, gamma).to(dtype), torch.randn(ROWS, 2 * WIDTH).to(dtype)
            step, graph, plan = inverted(model, x)
            predicted = worst_error(graph, plan.schedule)
            measured, gradients = errors_of(model, step, plan, x)
            name = f"{str(dtype).removeprefix('torch.')}{'' if gamma == 1 else f', γ = {gamma}'}"
            print(f"  {name:18} {depth:3d} blocks: {predicted:.1e} {measured:.1e} {predicted / measured:5.2f}   "
                  f"gradients {gradients:.1e}")  # fmt: skip


def anchors() -> None:
    """Print what anchors (stored tensors that end a chain of inverses) do to a chain of 96 blocks in bfloat16."""
    print(
        "\nAnchors, 96 blocks in bfloat16: limit, tensors kept as anchors, error measured, gradients, activations"
    )
    torch.manual_seed(0)
    model, x = Chain(96).bfloat16(), torch.randn(ROWS, 2 * WIDTH).bfloat16()
    for limit in (1e9, None, 5e-3):
        step, graph, plan = inverted(model, x, limit)
        measured, gradients = errors_of(model, step, plan, x)
        kept = len(
            {t for i in step.inverses for t in step.writes(i)} - {t for i in graph.inverses for t in i.writes}
        )
        activations = plan.estimate.peak - graph.input_bytes - sum(graph.size[t] for t in graph.outputs)
        said = "none" if limit == 1e9 else "default" if limit is None else f"{limit:g}"
        print(f"  {said:8} {kept:4d}   {measured:.1e}   {gradients:.1e}   {show_bytes(activations)}")


def overlap(depths: tuple[int, ...]) -> None:
    """Print the times of plans on one lane and on two (threads), within the one-lane plan's peak and 1 MiB more."""
    print(f"\nTwo lanes, in the one lane's peak and in 1 MiB more; {torch.get_num_threads()} thread(s) an op")
    for strategy, kind in ((Reversible(), Chain), (ChenSqrt(), Residual)):
        for depth in depths:
            torch.manual_seed(0)
            model, x = kind(depth), torch.randn(4 * ROWS, 2 * WIDTH)
            step = with_inverses(capture(model, (x,), "couplings"), named_tensors(model)).step
            graph = with_loss_boundary(step, priced(step, "profile", max_inversion_error=1e9))
            plan = strategy.curve(graph, ())[-1]
            runs = runs_of(plan.schedule)
            sharing = measured_sharing(step, runs, place(graph, runs), {n: graph.op[n].cost for n in runs})
            print(f"  {depth:3d} blocks, {strategy.name}: each lane at {sharing.speed:.2f} of its speed")
            budgets = (plan.estimate.peak, plan.estimate.peak + 2**20)
            plans = [plan, *(p for b in budgets if (p := on_two_lanes(graph, plan, b, sharing)))]
            _race(model, step, x, graph, plans)


def _race(model: nn.Module, step: CapturedStep, x: Tensor, graph: TrainingGraph, plans: list[Plan]) -> None:
    """Run plans alternately, and print the peak and the time of each ÷ the time of the first."""
    steps = [planned_step(model, step, p) for p in plans]
    timed = {str(k): partial(planned, x) for k, planned in enumerate(steps)}
    seconds = list(interleaved_seconds(timed, torch.device("cpu"), 9).values())
    for plan, planned, time in zip(plans, steps, seconds, strict=True):
        peak = show_bytes(_peak(model, partial(planned, x)) + graph.input_bytes)
        print(f"    {'two lanes' if plan.lanes else 'one lane ':9}  peak {show_bytes(plan.peak):>10} ({peak} measured)"
              f"   {1e3 * time:6.1f} ms, ratio {time / seconds[0]:.3f} {_ahead(graph, plans[0], plan)}")  # fmt: skip


def _ahead(graph: TrainingGraph, plan: Plan, laned: Plan) -> str:
    """Return, as text, the predicted time of two lanes ÷ one: at the measured speed of the lanes, at 0.75 and at 1.

    Empty for a plan on one lane.
    """
    if laned.lanes is None:
        return ""
    saves = [
        on_two_lanes(graph, plan, laned.lanes.peak, Sharing(speed))
        for speed in (laned.lanes.speed, 0.75, 1.0)
    ]
    shares = [1 - saved(p, plan.estimate.cost) for p in saves if p]
    return f"(predicted {shares[0]:.3f}; at 0.75 of the speed {shares[1]:.3f}, at 1 {shares[2]:.3f})"


NETWORKS = {
    "revnet38": ("--dim", "batch=32"),
    "revvit_s": ("--dim", "batch=8", "--dim", "image=96"),
    "revcol_t": ("--dim", "batch=4", "--dim", "image=64"),
    "revbert": (
        "--dim",
        "batch=4",
        "--dim",
        "tokens=64",
        "--dim",
        "depth=8",
        "--dim",
        "width=128",
        "--dim",
        "vocabulary=1000",
    ),
}


def side_by_side(names: tuple[str, ...], seconds: int) -> None:
    """Run ``rematplan compare`` on networks, with a picture NAME.png for each. ``seconds``: of each search."""
    for name in names:
        sys.stdout.flush()
        command(["compare", name, *NETWORKS[name], "-S", f"time_limit={seconds}", "--png", f"{name}.png"])


def main() -> None:
    """Run all parts. ``--quick``: smaller depths. ``--overlap``: only the two lanes. ``--compare``: only the
    strategies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    quick = args.quick
    if args.compare:
        side_by_side(tuple(NETWORKS)[: 2 if quick else None], 5 if quick else 20)
        return
    overlap((8,) if quick else (1, 8, 9, 32))
    if args.overlap:
        return
    memory((4, 16, 64) if quick else (4, 16, 64, 256))
    errors((6, 24) if quick else (6, 12, 24, 48, 96))
    anchors()
    side_by_side(tuple(NETWORKS)[: 2 if quick else None], 5 if quick else 20)


if __name__ == "__main__":
    main()
