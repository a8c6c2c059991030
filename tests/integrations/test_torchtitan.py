"""Laws of a budget in torchtitan: its debug Llama trains with the same bits as without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import UsageError

llama3 = pytest.importorskip("torchtitan.models.llama3")
attention = pytest.importorskip("torchtitan.models.common.attention")

from rematplan.integrations.torchtitan import BudgetAC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 20


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
