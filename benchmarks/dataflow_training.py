"""Errors of gradients by inversion, and what they do to a training: small networks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pictures import picture
from torch import Tensor, nn

from rematplan.pipeline.schedules import schedule_named
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay
from rematplan.report.plot import COLOURS, MARKERS


class Couplings(nn.Module):
    """A stage of additive couplings of two-layer functions, on two tensors (N, ``width``) stored as one (N, 2 ·
    ``width``).

    ``count``: the number of couplings. ``inputs``: if above 0, a first layer embeds that many features. ``classes``: if
    above 0, `head` is a last layer to that many scores.
    """

    def __init__(self, count: int, width: int, inputs: int = 0, classes: int = 0) -> None:
        super().__init__()
        self.functions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2 * count)
        )
        self.embed = nn.Linear(inputs, 2 * width) if inputs else None
        self.head = nn.Linear(2 * width, classes) if classes else None

    def forward(self, x: Tensor) -> Tensor:
        """Return both tensors after the couplings, concatenated: (N, 2 · width). The head is not applied."""
        a, b = (x if self.embed is None else self.embed(x)).chunk(2, -1)
        for f, g in zip(self.functions[::2], self.functions[1::2], strict=True):
            a = a + f(b)
            b = b + g(a)
        return torch.cat([a, b], -1)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Return the input of the couplings, recovered from their output ``y``, (N, 2 · width)."""
        a, b = y.chunk(2, -1)
        for f, g in zip(reversed(self.functions[::2]), reversed(self.functions[1::2]), strict=True):
            b = b - g(a)
            a = a - f(b)
        return torch.cat([a, b], -1)


def backward_by_inversion(stages: Sequence[Couplings], y: Tensor, gradient: Tensor) -> Tensor:
    """Compute the gradients of all stages from the last output ``y`` and its gradient alone; return the recovered
    input.

    The input of each stage is recovered by its inverse, and its forward is run again to differentiate it.
    """
    for stage in reversed(stages):
        y = stage.inverse(y)
        x = y.detach().requires_grad_(True)
        stage(x).backward(gradient)
        assert x.grad is not None
        gradient = x.grad
    return y


def errors(quick: bool, folder: Path | None) -> None:
    """Print, by number of couplings and type, the errors of gradients by inversion and by plain autograd.

    Errors are L2 distances from float64's gradients, relative to their norm. ``quick``: fewer couplings. ``folder``:
    where a picture is saved; None: nowhere.
    """
    depths = (4, 16, 64) if quick else (2, 4, 8, 16, 32, 64, 128)
    rows: dict[str, list[float]] = {}
    for count in depths:
        torch.manual_seed(0)
        exact = Couplings(count, 64).double()
        x, direction = torch.randn(32, 128, dtype=torch.float64), torch.randn(32, 128, dtype=torch.float64)
        exact(x).backward(direction)
        true = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
        for kind in (torch.float64, torch.float32, torch.bfloat16):
            for how in ("inversion", "autograd"):
                net = Couplings(count, 64).double()
                net.load_state_dict(exact.state_dict())
                net, mine, to = net.to(kind), x.to(kind), direction.to(kind)
                with torch.no_grad():
                    out = net(mine)
                if how == "inversion":
                    backward_by_inversion([net], out, to)
                else:
                    net(mine).backward(to)
                got = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()
                error = float((got - true).norm() / true.norm())
                rows.setdefault(f"{str(kind).removeprefix('torch.')}, {how}", []).append(error)
    for name, row in rows.items():
        print(f"{name:20} " + "  ".join(f"{d}: {e:.1e}" for d, e in zip(depths, row, strict=True)))
    if folder:
        figure, axes = picture("couplings", "relative error of the gradients")
        for k, (name, row) in enumerate(rows.items()):
            style = "-" if name.endswith("inversion") else ":"
            shown = [max(e, 1e-18) for e in row]
            axes.plot(depths, shown, style, color=COLOURS[k // 2], marker=MARKERS[k // 2], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=7)
        figure.savefig(folder / "dataflow-errors.png", dpi=130)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` noisy pictures of ten shapes of 8 × 8 points, shifted by up to one point, and the shapes'
    numbers.

    ``seed``: for shifts and noise; the shapes are always the same. Pictures are (count, 64).
    """
    shapes = torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(1)) > 0.6
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [shapes[k].float().roll(m, (0, 1)) for k, m in zip(labels.tolist(), moves, strict=True)]
    )
    return (images + 0.6 * torch.randn(images.shape, generator=generator)).flatten(1), labels


@dataclass
class Trainer:
    """Trains the stages of a dataflow pipeline in one process, action by action in the order of the simulated timeline.

    ``every``: a stage updates its weights after this many of its backwards, and inverts with its weights at that
    moment; 0: all stages update once at the end of a step. ``ranks``: the number of stages. ``microbatches``: in a
    step. ``rate``: the learning rate. ``drift``: the largest relative error of a recovered input so far.
    """

    every: int
    ranks: int = 4
    microbatches: int = 16
    rate: float = 0.02
    drift: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        last = self.ranks - 1
        self.stages = [
            Couplings(2, 32, 64 if s == 0 else 0, 10 if s == last else 0) for s in range(self.ranks)
        ]
        self.optimizers = [torch.optim.SGD(s.parameters(), self.rate, 0.9) for s in self.stages]
        times = [StageTimes(1, 2)] * self.ranks
        line = replay(schedule_named("dataflow", self.ranks, 4096, hop=0.1), times, Link(0.3))
        spans = sorted((span for row in line.rows for span in row), key=lambda span: span.start)
        self.actions = [span.action for span in spans]

    def run(self, steps: int) -> list[float]:
        """Train for ``steps`` steps, and return the loss of each micro-batch, in order."""
        total = steps * self.microbatches
        images, labels = digits(8 * total, 2)
        batches = list(zip(images.split(8), labels.split(8), strict=True))
        losses, sent, back, truth = [0.0] * total, {}, {}, {}
        schedules = self._steps(total)
        for action in schedules:
            s, m = action.stage, action.microbatch
            stage, last = self.stages[s], s == self.ranks - 1
            if action.kind == "F":
                x = batches[m][0] if s == 0 else sent.pop((s - 1, m))
                if s:
                    truth[s, m] = x
                with torch.no_grad():
                    sent[s, m] = stage(x)
                continue
            if last:
                y = sent.pop((s, m)).requires_grad_(True)
                assert stage.head is not None
                loss = nn.functional.cross_entropy(stage.head(y), batches[m][1])
                loss.backward()
                losses[m], gradient = float(loss.detach()), y.grad
            else:
                y, gradient = back.pop((s + 1, m))
            self._backward(s, m, batches[m][0], y.detach(), gradient, truth, back)
            self._update(s, m, total)
        return losses

    def _steps(self, total: int) -> list:
        """Return the actions of ``total`` micro-batches in order: step by step if ``every`` is 0, otherwise as one
        stream."""
        if self.every:
            return [a for a in self.actions if a.microbatch < total]
        once = [a for a in self.actions if a.microbatch < self.microbatches]
        return [
            replace(a, microbatch=a.microbatch + k) for k in range(0, total, self.microbatches) for a in once
        ]

    def _backward(self, s, m, image, y, gradient, truth, back) -> None:
        stage = self.stages[s]
        if s == 0:
            stage(image).backward(gradient)
            return
        x = stage.inverse(y)
        true = truth.pop((s, m))
        self.drift = max(self.drift, float((x - true).norm() / true.norm()))
        x = x.requires_grad_(True)
        stage(x).backward(gradient)
        back[s, m] = (x.detach(), x.grad)

    def _update(self, s: int, m: int, total: int) -> None:
        every = self.every or self.microbatches
        if (m + 1) % every and m + 1 < total:
            return
        for p in self.stages[s].parameters():
            if p.grad is not None:
                p.grad.div_(every)
        self.optimizers[s].step()
        self.optimizers[s].zero_grad()


def plain_training(steps: int) -> list[float]:
    """Train the same networks on the same data with plain autograd, and return the loss of each micro-batch."""
    trainer = Trainer(0)
    images, labels = digits(8 * steps * trainer.microbatches, 2)
    losses = []
    for m, (x, y) in enumerate(zip(images.split(8), labels.split(8), strict=True)):
        for stage in trainer.stages:
            x = stage(x)
        head = trainer.stages[-1].head
        assert head is not None
        loss = nn.functional.cross_entropy(head(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if (m + 1) % trainer.microbatches == 0:
            for s in range(trainer.ranks):
                trainer._update(s, m, len(losses) + 1)
    return losses


def training(quick: bool, folder: Path | None) -> None:
    """Train by plain autograd, and by dataflow with one update per step or several; print the mean losses at the end.

    ``quick``: fewer steps. ``folder``: where a picture is saved; None: nowhere.
    """
    steps = 30 if quick else 160
    rows = {"one process": plain_training(steps)}
    for every in (0, 16, 4, 1):
        trainer = Trainer(every, rate=0.02 if every in (0, 16) else 0.02 * every / 16)
        rows[f"async, update every {every}" if every else "sync"] = trainer.run(steps)
        print(
            f"{'async, every ' + str(every) if every else 'sync':16} reconstruction off by up to {trainer.drift:.1e}"
        )
    sixth = len(rows["sync"]) // 6
    for name, row in rows.items():
        print(f"{name:24} mean loss of the last sixth {sum(row[-sixth:]) / sixth:.4f}")
    if folder:
        figure, axes = picture("micro-batches", "loss, mean of 64")
        for k, (name, row) in enumerate(rows.items()):
            means = torch.tensor(row[: len(row) // 64 * 64]).reshape(-1, 64).mean(1)
            axes.plot([64 * i for i in range(len(means))], means, color=COLOURS[k], label=name, linewidth=1.2)
        axes.legend(fontsize=8)
        figure.savefig(folder / "dataflow-training.png", dpi=130)
