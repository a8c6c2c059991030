"""Laws of a budget in torchtitan: its debug Llama trains with the same bits as without it."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import InfeasibleBudget, UsageError, show_bytes
from rematplan.runtime.costs.measure import peak_above_entry

llama3 = pytest.importorskip("torchtitan.models.llama3")
attention = pytest.importorskip("torchtitan.models.common.attention")

from rematplan.integrations.torchtitan import BudgetAC  # noqa: E402
from rematplan.integrations.torchtitan_graphs import peak_bytes, register_budget  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6


def llama(policy: Any = None) -> nn.Module:
    """The debug model with two blocks, made as torchtitan makes it: on the meta device, with the policy applied before
    there are weights."""
    config = llama3._debugmodel("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # without a mask, as on a CPU
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model: Any = config.build()
    if policy is not None:
        policy.build(dump_folder="").apply(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    found: nn.Module = model.train()
    return found


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for at in range(STEPS):
        words = torch.randint(2048, (4, 65), generator=torch.Generator().manual_seed(at))
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def test_blocks_are_planned_where_checkpoints_would_be() -> None:
    policy = BudgetAC.Config(budget="80% of activations", strategy="approx_dp", costs="roofline")
    plain, planned = llama(), llama(policy)
    assert list(planned.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, trained(planned), trained(plain)))
    plans = [rematplan.planning(block).plan for block in planned.get_submodule("layers").children()]
    assert len(plans) == 2
    assert all(plan.estimate.reruns > 0 for plan in plans)


def test_a_policy_without_a_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no budget; state one, such as BudgetAC"):
        BudgetAC.Config().build(dump_folder=str(tmp_path)).apply(llama())


def traced() -> tuple[Any, tuple[Tensor, Tensor], Any]:
    """The graph of a training step as the graph trainer makes it, with the step and its batch."""
    tracer = importlib.import_module("torchtitan.experiments.graph_trainer.make_fx_tracer")
    common = importlib.import_module("torchtitan.experiments.graph_trainer.common_utils")
    model = llama()
    common.annotate_module_fqns(model)

    def step(words: Tensor, labels: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    words = torch.randint(2048, (4, 129), generator=torch.Generator().manual_seed(0))
    batch = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    found = tracer.minimal_fx_tracer(step, module=model)(*batch)
    return found, batch, (step, tracer.run_traced(found, module=model))


def compiled(found: Any) -> None:
    """Apply the registered policy, and torchtitan's recomputation."""
    at = "torchtitan.experiments.graph_trainer."
    importlib.import_module(f"{at}registry").MEMORY_POLICY_REGISTRY["rematplan"](found.gm, config=None)
    importlib.import_module(f"{at}selective_activation_remat").selective_activation_remat_pass(found.gm)
    found.gm.recompile()


@pytest.mark.parametrize("budget", ["100%", "85%", "70% of activations"])
def test_a_memory_policy_keeps_a_graph_within_its_budget(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, batch, (step, run) = traced()
    inputs, whole = peak_bytes(found.gm.graph)
    share = float(budget.split("%")[0]) / 100
    most = inputs + share * (whole - inputs) if "activations" in budget else share * whole
    register_budget(budget)
    compiled(found)
    peak = peak_bytes(found.gm.graph)[1]
    assert 0.9 * most < peak <= most
    assert all(map(torch.equal, run(*batch), step(*batch)))
    measured, _ = peak_above_entry(lambda: run(*batch), torch.device("cpu"))
    assert measured + inputs == peak
    assert f"has a peak of {show_bytes(peak)} within {show_bytes(int(most))}" in capsys.readouterr().err


def test_a_memory_policy_below_the_peak_of_recomputing_all_is_refused() -> None:
    found, _, _ = traced()
    register_budget("10%")
    with pytest.raises(InfeasibleBudget, match="is below the smallest found"):
        compiled(found)
    with pytest.raises(UsageError, match="not possible here"):
        register_budget("min")
