"""A plan file of the command line is one of `plan_module`'s, and the other way round: both plan the same step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rematplan
from rematplan import api
from rematplan.ir import ProblemError
from rematplan.models import ZOO, build, example_inputs

NETWORKS = ("unet", "gpt12", "revnet38")


def sizes(name: str) -> tuple[str, ...]:
    return tuple(text for size, n in ZOO[name].tiny.items() for text in ("--dim", f"{size}={n}"))


def bits(
    model: torch.nn.Module, called: torch.nn.Module, batch: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    loss = called(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_file_works_both_ways(name: str, tmp_path: Path, call: Callable[..., Any]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    quick = ("--strategy", "chen_greedy", "--costs", "roofline")
    assert call("plan", name, *sizes(name), "--budget", "least", *quick, "-o", str(first)).status == 0

    loaded = api.load_step(name, sizes=api.Sizes(**ZOO[name].tiny))
    planned = rematplan.plan_module(
        loaded.module, loaded.batch, costs="roofline", strategy=rematplan.SavedPlan(first)
    )
    assert planned.plan.estimate.reruns > 0
    results = [bits(loaded.module, called, loaded.batch) for called in (loaded.module, planned)]
    assert all(map(torch.equal, *results))

    rematplan.save_plan(planned.plan, second)
    said = call(
        "step", name, *sizes(name), "--plan", str(second), "--costs", "roofline", "--verify", "--steps", "1"
    )
    assert said.status == 0
    assert "bit-equal" in said.out


def test_a_plan_of_the_step_is_none_of_the_network_without_its_loss(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    file = tmp_path / "plan.json"
    quick = ("--strategy", "store_all", "--costs", "roofline", "--budget", "1GiB")
    assert call("plan", "unet", *sizes("unet"), *quick, "-o", str(file)).status == 0
    network, batch = build("unet", **ZOO["unet"].tiny), example_inputs("unet", **ZOO["unet"].tiny)
    with pytest.raises(ProblemError, match=r"its loss \(which the command line's plans contain\)"):
        rematplan.plan_module(network, batch, costs="roofline", strategy=rematplan.SavedPlan(file))
