"""Measure a CUDA device in one call of under eight minutes: tests, peaks, times. `make gpu` runs it.

usage: python benchmarks/gpu.py [--device cuda] [--minutes 7.5] [--json gpu.json] [--table gpu.md] [--small]

1. The tests that use a CUDA device.
2. For ResNet-50, a GPT, U-Net and a Llama-like decoder, in float32 and bfloat16: eager mode, checkpointing of each
   block, torch.compile, and plans at four budgets (90 %, 70 % and 50 % of the peak without recomputation, and the
   smallest). Each row has the plan's predicted peak, the measured peak of allocated bytes, and the ratio of the step's
   time to eager mode's, all measured alternately in one process.
3. The plan at 50 % with recomputation on a second stream.

The files are written again after each network, so an interrupted call leaves its results so far. Nothing is
downloaded. Rows for which the time is too short are reported as left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from llama_like import DecoderBlock, LlamaLike
from one_step import peak_of, stepper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.ir.files import write_whole
from rematplan.models import build
from rematplan.models.resnet import Residual
from rematplan.models.transformer import Block
from rematplan.runtime.costs.measure import interleaved_seconds, synchronize

BUDGETS = ("90%", "70%", "50%", "min")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDS = 5
TESTS = ("tests/module/test_devices.py", "tests/runtime/problem/test_charged_on_cuda.py")
MORE_TESTS = ("tests/runtime/execute/test_two_lanes.py", "tests/runtime/execute/test_training_step.py")
COMPILING = 60.0
"""Seconds that must be left for torch.compile to be tried: it takes about that for one of the networks."""
PLANNING = 3.0
"""Seconds for each plan's search, in addition to profiling the ops, which is done once per network."""


Maker: TypeAlias = tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]]]
"""How a model is made, and what its plan says of it."""


@dataclass(frozen=True)
class Case:
    """A network to measure.

    ``make``: builds it. ``inputs``: makes a batch. ``block``: the class of the modules that are checkpointed.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    block: type[nn.Module]


@dataclass(frozen=True)
class Row:
    """What was measured of one network, type and method.

    ``network``, ``dtype``, ``step``: their names. ``budget``, ``promised``: the plan's budget and predicted peak in
    bytes; None without a plan. ``allocated``: the measured peak in bytes. ``time``: step time ÷ eager mode's.
    ``note``: why figures are absent.
    """

    network: str
    dtype: str
    step: str
    budget: int | None = None
    promised: int | None = None
    allocated: int | None = None
    time: float | None = None
    note: str = ""


def cases(small: bool) -> Mapping[str, Case]:
    """Return the networks by name, at sizes for a data-centre GPU or, if ``small``, for a quick look on any device."""
    image, batch = (32, 2) if small else (224, 64)
    tokens, depth, width = (16, 2, 32) if small else (1024, 12, 768)
    vocabulary, texts = (64, 2) if small else (32000, 8)
    unet_image, unet_width = (32, 4) if small else (512, 64)

    def pictures(number: int, size: int) -> tuple[Tensor, ...]:
        return (torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(0)),)

    def text() -> tuple[Tensor, ...]:
        return (torch.randint(0, vocabulary, (texts, tokens), generator=torch.Generator().manual_seed(0)),)

    return {
        "resnet50": Case(partial(build, "resnet50", image=image), partial(pictures, batch, image), Residual),
        "gpt": Case(
            partial(build, "gpt12", tokens=tokens, depth=depth, width=width, vocabulary=vocabulary),
            text,
            Block,
        ),
        "unet": Case(
            partial(build, "unet", image=unet_image, width=unet_width),
            partial(pictures, 1 if small else 4, unet_image),
            nn.Sequential,
        ),
        "llama": Case(
            partial(
                LlamaLike,
                tokens=tokens,
                depth=depth,
                width=width,
                heads=2 if small else 12,
                groups=1 if small else 4,
                vocabulary=vocabulary,
            ),
            text,
            DecoderBlock,
        ),
    }


class MeanSquare(nn.Module):
    """A network together with a mean square loss, under autocast unless ``dtype`` is float32."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.network, self.dtype, self.kind = network, dtype, torch.device(device).type

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean square of the network's output, in float32."""
        with torch.autocast(self.kind, self.dtype, enabled=self.dtype is not torch.float32):
            return cast(Tensor, self.network(*inputs)).float().pow(2).mean()


class Bench:
    """One run of this benchmark. ``end``: the deadline. ``rows``: the results so far. ``tests``: the outcome of the
    tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + 60 * options.minutes
        self.device = torch.device(options.device)
        self.rows: list[Row] = []
        self.tests = "not run"

    @property
    def left(self) -> float:
        """The seconds until the deadline; negative after it."""
        return self.end - time.monotonic()

    def run(self) -> None:
        """Run the tests on CUDA, then measure network by network, and write the files again after each."""
        if self.device.type == "cuda":
            self.tests = self.tested()
        self.write()
        every = [(name, case, t) for name, case in cases(self.options.small).items() for t in TYPES]
        for name, case, dtype in every:
            self.rows += self.measured(
                name, case, dtype, self.steps(case, dtype, case_inputs(case, self.device))
            )
            self.write()
        for name, case, dtype in reversed(every):  # bfloat16 first, for which people compile
            self.rows += self.measured(name, case, dtype, self.compiled(case, dtype))
            self.write()

    def tested(self) -> str:
        """Run the tests that use a CUDA device, for at most a quarter of the time left; return pytest's last lines."""
        found = []
        for files in (TESTS, MORE_TESTS):
            command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *files]
            if find_spec("xdist"):
                command += ["-n", "auto"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=max(10.0, self.left / 8)
                )
                found.append((done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1])
            except subprocess.TimeoutExpired:
                found.append(f"{' '.join(files)}: not done in an eighth of the time")
        return "; ".join(found)

    def model(self, case: Case, dtype: str) -> nn.Module:
        """Return the network with its loss on the device, with weights from a fixed seed. ``dtype``: a key of
        `TYPES`."""
        torch.manual_seed(0)
        return MeanSquare(case.make(), TYPES[dtype], self.options.device).to(self.device)

    def measured(self, name: str, case: Case, dtype: str, makers: Mapping[str, Maker]) -> Iterator[Row]:
        """Measure a network by several methods, alternately, and yield a row for each."""
        inputs = case_inputs(case, self.device)
        steps: dict[str, Callable[[], None]] = {}
        facts: dict[str, dict[str, Any]] = {}
        for step, (make, more) in makers.items():
            if self.left < (COMPILING if step == "compile" else 5.0):
                facts[step] = {"note": "left out: no time"}
                continue
            try:
                model = make()
                facts[step] = {**more(model), "allocated": peak_of(model, inputs, self.device)}
                steps[step] = stepper(model, inputs)
            except (InfeasibleBudget, RuntimeError) as error:
                facts[step] = {"note": str(error).splitlines()[0]}
        seconds = interleaved_seconds(steps, self.device, ROUNDS, settling=1)
        for step, found in facts.items():
            ratio = seconds[step] / seconds["eager"] if step in seconds else None
            row = Row(name, dtype, step, time=ratio, **found)
            print(row, flush=True)
            yield row
        steps.clear()
        gc.collect()

    def compiled(self, case: Case, dtype: str) -> dict[str, Maker]:
        """Return the makers of eager mode and of `torch.compile`, for `measured`."""
        plain = partial(self.model, case, dtype)
        return {
            "eager": (plain, lambda _: {}),
            "compile": (lambda: cast(nn.Module, torch.compile(plain())), lambda _: {}),
        }

    def steps(self, case: Case, dtype: str, inputs: tuple[Tensor, ...]) -> dict[str, Maker]:
        """Return the makers of eager mode, checkpointing, and plans at several budgets, for `measured`."""

        def checkpointed() -> nn.Module:
            model = self.model(case, dtype)
            for block in [m for m in model.modules() if isinstance(m, case.block)]:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            return model

        def planned(budget: str, **lanes: Any) -> nn.Module:
            return rematplan.plan_module(
                self.model(case, dtype),
                inputs,
                budget=budget,
                strategy=rematplan.Auto(time_limit=PLANNING, **lanes),
            )

        def promise(model: nn.Module) -> dict[str, Any]:
            plan = rematplan.planning(model).plan
            return {"budget": plan.budget, "promised": plan.peak}

        plain = partial(self.model, case, dtype)
        return {
            "eager": (plain, lambda _: {}),
            "checkpoint": (checkpointed, lambda _: {}),
            **{f"plan {budget}": (partial(planned, budget), promise) for budget in BUDGETS},
            "plan 50%, two streams": (partial(planned, "50%", two_lanes="on"), promise),
        }

    def write(self) -> None:
        """Write the JSON file and the table with the results so far. Each file is complete at any moment."""
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        facts = {
            "device": card,
            "torch": torch.__version__,
            "rematplan": rematplan.__version__,
            "tests": self.tests,
            "rows": [asdict(row) for row in self.rows],
        }
        write_whole(self.options.json, json.dumps(facts, indent=1) + "\n")
        write_whole(self.options.table, table(facts, self.rows))


def case_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch of inputs of a network on a device."""
    return tuple(t.to(device) for t in case.inputs())


def table(facts: Mapping[str, Any], rows: list[Row]) -> str:
    """Return the rows as a table of Markdown, below a line about the device. Shares are of the plan's budget."""
    lines = [
        f"{facts['device']}, torch {facts['torch']}, rematplan {facts['rematplan']}. Tests: {facts['tests']}",
        "",
        "| network | type | step | promised, MiB | allocated | ÷ budget | time ÷ eager | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mib = [f"{b / 2**20:.0f}" if b is not None else "" for b in (row.promised, row.allocated)]
        share = f"{row.allocated / row.budget:.3f}" if row.allocated is not None and row.budget else ""
        ratio = "" if row.time is None else f"{row.time:.3f}"
        cells = (row.network, row.dtype, row.step, mib[0], mib[1], share, ratio, row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write both files, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="where to run; cpu leaves the tests and streams out")
    parser.add_argument("--minutes", type=float, default=7.5, help="what is left out after that is named")
    parser.add_argument("--json", default="gpu.json", help="the file of all figures")
    parser.add_argument("--table", default="gpu.md", help="the file of the table")
    parser.add_argument("--small", action="store_true", help="tiny networks, for a quick look")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu.py: no CUDA device is here; --device cpu --small shows what would be measured\n")
    bench = Bench(options)
    bench.run()
    synchronize(bench.device)
    print(Path(options.table).read_text())


if __name__ == "__main__":
    main()
