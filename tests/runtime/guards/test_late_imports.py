"""What modules register when a forward imports them stays registered, though a trace restores Python state."""

import sys
from pathlib import Path

import pytest
import torch
from same_bits import equal_after

import rematplan

LAYER = """
from torch import nn

FOUND, CALLS = {}, []


def activation(name):
    if not FOUND:
        import late_activations
    CALLS.append(name)
    return FOUND[name]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return activation("sine")(self.up(x))
"""
LATE = """
import late_layer

late_layer.FOUND["sine"] = lambda x: x.sin()
"""


def test_what_an_import_in_a_forward_registers_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_layer.py").write_text(LAYER)
    (tmp_path / "late_activations.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_layer", "late_activations"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    import late_layer

    torch.manual_seed(0)
    plain, x = late_layer.Net(), torch.randn(4, 8)
    planned = rematplan.plan_module(plain, (x,), budget="100%", costs="roofline")
    assert "late_activations" in sys.modules
    assert list(late_layer.FOUND) == ["sine"]
    late_layer.CALLS.clear()
    equal_after(lambda model: [model(x)], planned, plain)
