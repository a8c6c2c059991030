"""Compare second-order optimizers with others: loss by steps and by CPU seconds, and iterations to a target by batch
size.

    python benchmarks/second_order.py autoencoder --seconds 4 --folder build
    python benchmarks/second_order.py classifier --batches 64,256,1024,1797

One thread and fixed seeds are used. Each optimizer runs with three values of each of its two main settings, and the
best of the nine runs counts. The learning rate falls to zero over a run. It needs scikit-learn (for its 1,797 real
digits) and, for SOAP, pytorch_optimizer: pip install rematplan[benchmarks].
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.models import build

Batch = tuple[Tensor, Tensor]
EVERY, INVERSE_EVERY = 5, 10
TOKENS, VOCABULARY = 32, 16
SMOOTHED = 10
"""Steps over which a loss is averaged."""


@dataclass(frozen=True)
class Task:
    """A problem to train on.

    ``name``: its name. ``make``: builds the network. ``loss``: of outputs and targets. ``data``: returns all inputs and
    targets. ``likelihood``: as in `Kronecker`. ``batch``: the usual batch size. ``target``: the loss at which runs that
    count iterations end. ``sequences``: whether weights are shared over tokens.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], Batch]
    likelihood: str
    batch: int
    target: float
    sequences: bool = False


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits, (1797, 64), from 0 to 1, and their numbers."""
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def layers(*sizes: int) -> nn.Module:
    """Return linear layers between the given numbers of features, with tanh between them."""
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in linear[:-1])), linear[-1])


def text() -> Batch:
    """Return 1,797 random sequences of characters, and the next character of each place.

    Each character is drawn from a distribution that depends on the two characters before it.
    """
    generator = torch.Generator().manual_seed(7)
    table = torch.distributions.Dirichlet(torch.full((VOCABULARY,), 0.1))
    torch.manual_seed(7)
    odds = table.sample((VOCABULARY, VOCABULARY))
    rows = torch.randint(VOCABULARY, (1797, 2), generator=generator)
    for _ in range(TOKENS - 1):
        drawn = torch.multinomial(odds[rows[:, -2], rows[:, -1]], 1, generator=generator)
        rows = torch.cat((rows, drawn), 1)
    return rows[:, :-1], rows[:, 1:]


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy over all tokens of all samples."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


TASKS = {
    task.name: task
    for task in (
        Task(
            "autoencoder",
            lambda: layers(64, 256, 128, 64, 16, 64, 128, 256, 64),
            functional.mse_loss,
            lambda: (digits()[0],) * 2,
            "gaussian",
            256,
            0.02,
        ),
        Task(
            "classifier",
            lambda: layers(64, 128, 64, 10),
            functional.cross_entropy,
            digits,
            "categorical",
            256,
            0.1,
        ),
        Task(
            "characters",
            lambda: build("gpt12", depth=2, width=32, vocabulary=VOCABULARY, tokens=TOKENS),
            of_tokens,
            text,
            "categorical",
            64,
            1.6,
            sequences=True,
        ),
    )
}


@dataclass(frozen=True)
class Rival:
    """An optimizer to compare.

    ``name``: its name. ``make``: takes the model, a learning rate and a second setting (such as momentum or damping).
    ``rates``: learning rates to try. ``seconds``: second settings to try. ``statistics``: options of `Kronecker` that
    it needs; None if it needs none. ``sequences``: whether it only suits tasks with weights shared over tokens.
    """

    name: str
    make: Callable[[nn.Module, float, float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    seconds: tuple[float, ...]
    statistics: dict[str, Any] | None = None
    sequences: bool = False


class Both(torch.optim.Optimizer):
    """Muon for inner matrices and AdamW for all other parameters, as Muon's authors advise, as one optimizer.

    ``lr``, ``decay``: Muon's learning rate and weight decay.
    """

    def __init__(self, model: nn.Module, lr: float, decay: float) -> None:
        inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
        rest = [p for p in model.parameters() if all(p is not q for q in inner)]
        muon = torch.optim.Muon(inner, lr=lr, weight_decay=decay)
        self.parts = [muon, *([torch.optim.AdamW(rest, lr=3e-3)] if rest else [])]
        super().__init__(list(model.parameters()), {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Make one step of Muon and one of AdamW. ``closure`` is ignored."""
        del closure
        for part in self.parts:
            part.step()


def kfac(model: nn.Module, lr: float, damping: float) -> rematplan.KFAC:
    """Return K-FAC with the given learning rate and damping, and AdamW for parameters without factors."""
    return rematplan.KFAC(
        model,
        lr,
        damping=damping,
        momentum=0.5,
        inverse_every=INVERSE_EVERY,
        others=lambda p: torch.optim.AdamW(p, lr=3e-3),
    )


def soap(model: nn.Module, lr: float, beta: float) -> torch.optim.Optimizer:
    """Return SOAP with the given learning rate, and ``beta`` for both of its averages."""
    return pytorch_optimizer.SOAP(
        model.parameters(), lr=lr, betas=(beta, beta), precondition_frequency=INVERSE_EVERY
    )


KFAC_SETTINGS = ((0.1, 0.3, 1.0), (3e-4, 1e-3, 1e-2))
RIVALS = (
    Rival(
        "SGD",
        lambda m, lr, mu: torch.optim.SGD(m.parameters(), lr, momentum=mu),
        (0.1, 0.3, 1.0),
        (0.0, 0.9, 0.97),
    ),
    Rival(
        "AdamW",
        lambda m, lr, beta: torch.optim.AdamW(m.parameters(), lr, betas=(beta, 0.999)),
        (1e-3, 3e-3, 1e-2),
        (0.8, 0.9, 0.97),
    ),
    Rival("Muon", Both, (0.005, 0.02, 0.06), (0.0, 0.01, 0.1)),
    Rival("SOAP", soap, (1e-3, 3e-3, 1e-2), (0.9, 0.95, 0.98)),
    Rival("K-FAC", kfac, *KFAC_SETTINGS, {"approx": "expand"}),
    Rival("K-FAC reduce", kfac, *KFAC_SETTINGS, {"approx": "reduce"}, sequences=True),
    Rival("K-FAC empirical", kfac, *KFAC_SETTINGS, {"approx": "expand", "fisher": "empirical"}),
)


@dataclass
class Run:
    """The course of one training run.

    ``settings``: learning rate and second setting. ``losses``: of each step. ``seconds``: CPU seconds at the end of
    each step.
    """

    settings: tuple[float, float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        """The mean of the last `SMOOTHED` losses; infinite if there are none, or one is not finite."""
        last = self.losses[-SMOOTHED:]
        return statistics.fmean(last) if last and all(map(math.isfinite, last)) else math.inf


def batches(task: Task, size: int) -> Iterator[Batch]:
    """Yield batches of ``size`` samples of shuffled data, without end. Samples that do not fill a batch of an epoch are
    left out."""
    x, y = task.data()
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(len(x), generator=generator)
        for at in range(0, len(x) - size + 1, size):
            yield x[order[at : at + size]], y[order[at : at + size]]


def model_of(task: Task, rival: Rival, size: int) -> nn.Module:
    """Return the task's network with weights from a fixed seed, planned with statistics if the optimizer needs them.

    ``size``: of a batch.
    """
    torch.manual_seed(0)
    model = task.make()
    if rival.statistics is None:
        return model
    asked = rematplan.Kronecker(every=EVERY, likelihood=task.likelihood, **rival.statistics)
    x = next(batches(task, size))[0]
    return rematplan.plan_module(
        model, (x,), budget="300%", strategy="store_all", costs="roofline", statistics=asked
    )


def train(
    task: Task, rival: Rival, settings: tuple[float, float], size: int, done: Callable[[Run], float]
) -> Run:
    """Train a new model, and return the run. It also ends if the loss grows to 10⁴."""
    model = model_of(task, rival, size)
    optimizer = rival.make(model, *settings)
    rates = [group["lr"] for group in optimizer.param_groups]
    run, start = Run(settings), time.process_time()
    for x, y in batches(task, size):
        over = done(run)
        if over >= 1 or (run.losses and not run.losses[-1] < 1e4):
            return run
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - over)
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.seconds.append(time.process_time() - start)
    raise AssertionError("batches have no end")


def for_seconds(limit: float) -> Callable[[Run], float]:
    """Return a function for `train` that ends a run after ``limit`` CPU seconds."""
    return lambda run: (run.seconds[-1] if run.seconds else 0.0) / limit


def until(target: float, most: int) -> Callable[[Run], float]:
    """Return a function for `train` that ends a run at a loss of ``target``, or after ``most`` steps."""

    def done(run: Run) -> float:
        reached = len(run.losses) >= SMOOTHED and run.final <= target
        return 1.0 if reached else len(run.losses) / most

    return done


def tuned(task: Task, rival: Rival, size: int, seconds: float) -> Run:
    """Train with all pairs of settings for ``seconds`` CPU seconds each, and return the run with the smallest final
    loss."""
    tries = [
        train(task, rival, settings, size, for_seconds(seconds))
        for settings in itertools.product(rival.rates, rival.seconds)
    ]
    return min(tries, key=lambda run: run.final)


def iterations(task: Task, rival: Rival, size: int, most: int) -> int | None:
    """Return the least number of steps to the task's target over all learning rates; None if ``most`` steps never reach
    it.

    The second setting is the middle one. ``size``: of a batch.
    """
    found = []
    for rate in rival.rates:
        run = train(task, rival, (rate, rival.seconds[1]), size, until(task.target, most))
        if run.final <= task.target:
            found.append(len(run.losses))
    return min(found, default=None)


def draw(path: Path, task: Task, runs: dict[str, Run]) -> None:
    """Draw the smoothed losses of runs against steps and against CPU seconds, as a picture. ``runs``: by optimizer's
    name."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("steps", "CPU seconds"), strict=True):
        for name, run in runs.items():
            xs = run.seconds if kind != "steps" else list(range(1, len(run.losses) + 1))
            smooth = [
                statistics.fmean(run.losses[max(0, i - SMOOTHED) : i + 1]) for i in range(len(run.losses))
            ]
            axes.plot(xs, smooth, label=name if kind == "steps" else None)
        axes.set_xlabel(kind)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("training loss")
    figure.suptitle(f"{task.name}: batches of {task.batch}, one thread")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=130)


def chosen(task: Task, names: Sequence[str]) -> list[Rival]:
    """Return the optimizers that suit the task, and of these the named ones if ``names`` is not empty."""
    return [r for r in RIVALS if (task.sequences or not r.sequences) and (not names or r.name in names)]


def main() -> None:
    """Print, for one task, the final losses of all optimizers; with ``--batches``, the steps to the target by batch
    size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seconds", type=float, default=8.0, help="CPU seconds of a run")
    parser.add_argument("--batches", help="count iterations to the target for these batch sizes instead")
    parser.add_argument("--most", type=int, default=400, help="iterations at most, with --batches")
    parser.add_argument("--only", action="append", default=[], help="an optimizer; may be repeated")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    task = TASKS[args.task]
    if args.batches:
        sizes = [int(size) for size in args.batches.split(",")]
        for rival in chosen(task, args.only):
            counts = [iterations(task, rival, size, args.most) for size in sizes]
            print(f"{rival.name:16}", *(f"{c or '–':>6}" for c in counts), flush=True)
        return
    runs = {}
    for rival in chosen(task, args.only):
        runs[rival.name] = run = tuned(task, rival, task.batch, args.seconds)
        print(f"{rival.name:16} {run.final:9.2e}  {len(run.losses):6} steps  {run.settings}", flush=True)
    draw(args.folder / f"second-order-{task.name}.png", task, runs)
    record = {name: vars(run) | {"final": run.final} for name, run in runs.items()}
    (args.folder / f"second-order-{task.name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
