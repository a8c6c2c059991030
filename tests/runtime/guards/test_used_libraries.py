"""Laws of libraries and modules that a forward uses beside the model: nobody looks into them, and all may be used."""

import importlib
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, nn

import rematplan

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, **options: Any) -> nn.Module:
    return rematplan.plan_module(
        model, (X,), budget="1GiB", strategy="store_all", costs="roofline", **options
    )


class Noting(nn.Linear):
    """Uses an installed library."""

    def forward(self, x: Tensor) -> Tensor:
        networkx.Graph().add_edge(0, 1)
        return super().forward(x)


def test_nobody_looks_into_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = planned(Noting(4, 4))
    monkeypatch.setattr(networkx.Graph, "node_attr_dict_factory", type("Others", (dict,), {}))
    ours(X)
    assert len(ours.plans) == 1


@pytest.mark.parametrize("metadata", ["", "scaling_library-1.0.dist-info"])
def test_packages_in_a_folder_of_the_users_are_libraries_if_they_were_installed_there(
    metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"scaling_{'library' if metadata else 'code'}"
    (tmp_path / f"{name}.py").write_text("FACTOR = 2.0\n\ndef scaled(x):\n    return FACTOR * x\n")
    (tmp_path / metadata).mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    scaling = importlib.import_module(name)

    class Scaling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(scaling.scaled(x))

    ours = planned(Scaling(4, 4))
    monkeypatch.setattr(scaling, "FACTOR", 3.0)
    ours(X)
    assert len(ours.plans) == (1 if metadata else 2)


class Beside(nn.Module):
    """Calls modules of many kinds that are no parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        act = nn.Sequential(nn.LeakyReLU(0.5), nn.Tanh())
        traced = torch.jit.trace(act, X)
        self.acts = [torch.jit.script(act), traced, torch.fx.symbolic_trace(act), nn.DataParallel(nn.Tanh())]
        self.spare = [nn.LazyLinear(3), nn.RNN(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for act in self.acts:
            y = act(y)
        return y


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_all_kinds_may_be_used_with_a_model() -> None:
    ours = planned(Beside(), dynamic_shapes=False)
    with torch.no_grad():
        now = ours(X)
    for _ in range(2):
        assert torch.equal(ours(X), now)
