"""``rematplan audit``: exit status, verdict, table, and errors in one line."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, preserve):
        super().__init__()
        self.stem, self.block, self.preserve = nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5), nn.Tanh()), preserve

    def forward(self, x):
        return checkpoint(self.block, self.stem(x), use_reentrant=False, preserve_rng_state=self.preserve)


def sound():
    return Net(True), torch.randn(4, 8)


def redrawn():
    return Net(False), {"x": torch.randn(4, 8)}


def by_name():
    model = Net(True)
    x, loss = torch.randn(4, 8), lambda y: y.square().sum()
    return {"model": model, "args": (x,), "loss": loss, "plain": lambda x: model.stem(x)}


def fails():
    raise ValueError("no weights here")


def ends():
    raise SystemExit(3)


def no_inputs():
    return Net(True), None


def odd():
    return Net(True)


def does_not_run():
    return Net(True), torch.randn(4, 9)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "audited_nets.py").write_text(SOURCE)
    (tmp_path / "ends_when_loaded.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("audited_nets", None)


def test_a_sound_model(call: Callable[..., Any]) -> None:
    result = call("audit", "audited_nets:sound")
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[0] == "Net: sound"
    assert [row for row in ("plain", "its own checkpointing") if any(row in line for line in lines)] == [
        "plain",
        "its own checkpointing",
    ]


def test_a_fault(call: Callable[..., Any]) -> None:
    result = call("audit", "audited_nets:redrawn", "--json")
    assert result.status == 1
    found = json.loads(result.out)
    assert not found["sound"]
    assert found["faults"][0]["module"] == "block.0"
    assert found["verdict"].startswith(
        "Net: random numbers are drawn again in block.0: bernoulli_ differs by"
    )
    assert found["own"]["peak"] > 0


def test_a_dictionary_of_arguments(call: Callable[..., Any]) -> None:
    result = call("audit", "audited_nets:by_name", "--dtype", "bf16")
    assert result.status == 1
    assert "gradient stem.weight" in result.out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("audited_nets", "not of the form package.module:function"),
        ("audited_nets:nothing", "has no attribute 'nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("audited_nets:torch", "is not a function"),
        ("audited_nets:fails", "ValueError: no weights here"),
        ("audited_nets:ends", "SystemExit: 3"),
        ("ends_when_loaded:f", "SystemExit: 0"),
        ("audited_nets:odd", "must return a pair of the module and its inputs"),
        ("audited_nets:no_inputs", "the inputs must be a tensor"),
        ("audited_nets:does_not_run", "does not run without its checkpointing"),
    ],
)
def test_bad_targets(call: Callable[..., Any], refused: Callable[..., None], target: str, words: str) -> None:
    result = call("audit", target, "--quiet")
    refused(result, 2)
    assert words in result.err
