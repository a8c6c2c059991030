"""Steps of pipeline files in four gloo processes: each rank keeps its budget, and one process computes the same."""

from __future__ import annotations

import os
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_workers import Workers
from torch import nn
from torch.distributed.pipelining.stage import PipelineStage

from rematplan.cli import main
from rematplan.ir import ProblemError
from rematplan.models.coupling import Coupling
from rematplan.pipeline.run_step import RankReport, reports_of_step
from rematplan.planner.pipeline.pipeline_file import load_pipeline

pytestmark = pytest.mark.usefixtures("few_searches")
SIZES = ("--dim", "width=16", "--dim", "image=64", "--dim", "classes=5", "--dim", "batch=16")
ASKED = ("--stages", "4", "--microbatches", "4", "--costs", "roofline", "-S", "time_limit=0.1", "--quiet")
CUTS = "blocks.1,blocks.2,blocks.3"
REVERSIBLE = "blocks.blocks.1,blocks.blocks.2,blocks.blocks.3"


def planned(folder: Path, name: str, *more: str, depth: int = 4) -> Path:
    path = folder / "pipe.json"
    sizes = (*SIZES, "--dim", f"depth={depth}")
    assert main(["pipeline", name, *sizes, *ASKED, *more, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("step"), "vit_s", "--budget", "85%", "--cuts", CUTS)


def step(rank: int, path: Path, dies: bool = False, budget: int = 0) -> list[RankReport]:
    """A task of a process. ``dies``: rank 2 ends in its first backward. ``budget``: instead of the file's."""
    plan = load_pipeline(path)
    plan = replace(plan, budget=budget or plan.budget)
    if dies and rank == 2:
        PipelineStage.backward_one_chunk = lambda *_, **__: os._exit(1)
    return reports_of_step(plan, rank, verify=not dies, time_limit=0.2)


def check(reports: list[RankReport]) -> None:
    assert all(one.different == () and one.compared > 10 for one in reports)
    assert [len(one.losses) for one in reports] == [0, 0, 0, 4]


def test_ranks_recompute_to_stay_within_the_files_budget(workers: Workers, file: Path) -> None:
    reports = workers.run(step, path=file, budget=900 * 1024)[0]
    check(reports)
    assert all(one.promised <= 900 * 1024 for one in reports)
    assert [one.extra > 0 for one in reports] == [True, True, False, False]


def test_messages_may_be_transposed_in_memory(workers: Workers, tmp_path: Path) -> None:
    path = planned(tmp_path, "revvit_s", "--budget", "1GiB", "--cuts", REVERSIBLE)
    reports = workers.run(step, path=path)[0]
    check(reports)


def test_weight_gradients_may_be_computed_apart(workers: Workers, tmp_path: Path) -> None:
    cuts = ",".join(f"blocks.{k}" for k in range(1, 8))
    split = ("--schedule", "interleaved-zb", "--stages", "8", "--cuts", cuts)
    path = planned(tmp_path, "vit_s", *split, "--budget", "95%", depth=8)
    reports = workers.run(step, path=path)[0]
    assert [one.different for one in reports] == [()] * 4


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("model", None, "has 'None' as model"),
        ("sizes", {"batch": -1}, "has '-1' as batch, not a positive number"),
        ("sizes", {"colour": 1}, "has sizes that cannot be read"),
        ("sizes", {"width": 10**400}, f"has {'1' + 39 * '0'} as width, more than 2147483647"),
        (
            "sizes",
            {"depth": 10**9},
            "has impossible sizes: vit_s: depth is 1000000000; it must be 10000 or less",
        ),
        ("sizes", {"image": 3}, "has impossible sizes: vit_s: image is 3; it must be 16 or more"),
        ("dims", [["n", "1"]], "has '1' as n, not a positive number"),
        ("costs", 7, "has '7' as costs"),
        ("model", "nets", "cannot be loaded: 'nets' is neither an ONNX file nor a network of the zoo"),
        ("loss", "least", "cannot be loaded: unknown loss 'least'; known: output, cross_entropy"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(file: Path, field: str, value: Any, text: str) -> None:
    plan = load_pipeline(file)
    with pytest.raises(ProblemError, match=f"the file's model {text}"):
        reports_of_step(replace(plan, model={**plan.model, field: value}), 0, verify=False, time_limit=0.2)


def test_a_dataflow_is_within_the_predicted_error(workers: Workers, tmp_path: Path) -> None:
    path = planned(tmp_path, "revvit_s", "--schedule", "dataflow", "--budget", "1GiB", "--cuts", REVERSIBLE)
    reports = workers.run(step, path=path)[0]
    check(reports)
    assert all(0 < one.error <= one.expected for one in reports[:-1])


def exported(net: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Write a network as an ONNX file for training, with any number of samples."""
    how: dict[str, Any] = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(net, (x,), path, dynamo=False, training=training, **how)


class Residual(nn.Sequential):
    """The output plus the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + super().forward(x))


def test_a_step_of_an_onnx_file_has_the_bits_of_one_process(workers: Workers, tmp_path: Path) -> None:
    path, model = tmp_path / "pipe.json", tmp_path / "net.onnx"
    blocks = (Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    exported(nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, *head), torch.zeros(4, 3, 8, 8), model)
    asked = ("--dim", "batch=4", *ASKED, "--budget", "1GiB", "-o", str(path))
    assert main(["pipeline", str(model), *asked]) == 0
    reports = workers.run(step, path=path)[0]
    assert [one.different for one in reports] == [()] * 4
    assert sum(one.compared for one in reports) == 2 + 4 * (2 + 4) + 2 + 4
    assert [len(one.losses) for one in reports] == [0, 0, 0, 4]


class TwoHeads(nn.Module):
    """Layers with a second head behind the first one. The loss reads only the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.side = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](x).relu()
        side = self.side(x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x, side


def test_zeros_for_an_output_that_the_loss_does_not_read_are_no_difference(
    workers: Workers, tmp_path: Path
) -> None:
    path, model = tmp_path / "pipe.json", tmp_path / "net.onnx"
    exported(TwoHeads(), torch.zeros(4, 16), model)
    asked = ("--dim", "batch=4", *ASKED, "--budget", "1GiB", "-o", str(path))
    assert main(["pipeline", str(model), *asked]) == 0
    reports = workers.run(step, path=path)[0]
    assert [one.different for one in reports] == [()] * 4
    assert sum(one.compared for one in reports) == 2 * 5 + 4


class Halves(nn.Module):
    """An additive coupling of two halves of the channels."""

    def __init__(self) -> None:
        super().__init__()
        branches = [nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2)]
        self.coupling = Coupling(*branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat(self.coupling(a, b), 1)


def test_batch_norms_of_a_dataflow_are_within_the_predicted_error(workers: Workers, tmp_path: Path) -> None:
    """A stage has halves of channels as separate tensors, which batch norm sums in another order than slices."""
    path, model = tmp_path / "pipe.json", tmp_path / "net.onnx"
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Halves(), Halves(), Halves(), nn.Conv2d(8, 1, 1))
    exported(net, torch.zeros(4, 3, 8, 8), model)
    asked = ("--dim", "batch=4", *ASKED, "--budget", "1GiB", "--schedule", "dataflow", "--cuts", "2,3,4")
    assert main(["pipeline", str(model), *asked, "-o", str(path)]) == 0
    reports = workers.run(step, path=path)[0]
    assert [one.different for one in reports] == [()] * 4
    assert 0 < max(one.of_forwards for one in reports) < 1e-6


def test_dropout_draws_in_each_stage_what_it_draws_in_one_process(workers: Workers, tmp_path: Path) -> None:
    layers = [(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8)) for _ in range(4)]
    net = nn.Sequential(*(nn.Sequential(*some) for some in layers))
    model, path = tmp_path / "net.onnx", tmp_path / "pipe.json"
    exported(net, torch.zeros(4, 8), model)
    budget = ("--dim", "batch=32", "--budget", "90%", "--cuts", "1,2,3")
    assert main(["pipeline", str(model), *ASKED, *budget, "-o", str(path)]) == 0
    reports = workers.run(step, path=path)[0]
    assert [one.different for one in reports] == [()] * 4
    assert sum(one.compared for one in reports) == 4 * 4 + 4


def test_a_rank_that_ends_takes_all_with_it_in_seconds(workers: Workers, file: Path) -> None:
    began = time.monotonic()
    told = [
        answer for rank, (_, answer) in enumerate(workers.answers(step, path=file, dies=True)) if rank != 2
    ]
    assert time.monotonic() - began < 60
    for one in told:
        # No text of gloo's follows.
        assert re.fullmatch(r"ProcessEnded: rank \d: another process .* says why", one), one
