"""What is said while plans are made: lines of the log, and a bar on a terminal if it is wanted."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rematplan
from rematplan.planner.core.plan import plan_to_json
from rematplan.plans import refining

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """The logger as it is in a new process."""
    log = logging.getLogger("rematplan")
    kept, level, log.handlers = log.handlers, log.level, []
    yield
    log.handlers = kept
    log.setLevel(level)


def planned(**options: Any) -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    return rematplan.plan_module(model, (X,), costs="roofline", **{"budget": "100%", **options})


def test_the_log_has_model_shapes_peak_overhead_gap_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rematplan"):
        planned()
    (line,) = [r.message for r in caplog.records if r.name == "rematplan"]
    wanted = r"plan of Sequential: .*peak .*iB, overhead 0\.00 % \(bound 0\.00 %, gap 0\.00 points\).*"
    assert re.search(wanted + r"float32\[256, 16\]; costs \d\.\d s, search \d\.\d s", line)


def test_a_terminal_shows_progress_and_nothing_else_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        planned()
        assert ("\x1b" in stream.getvalue()) is isinstance(stream, Terminal)
        assert "plan of Sequential" not in stream.getvalue()
    assert capsys.readouterr().out == ""


def test_a_plan_says_whether_a_better_one_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def submit(self, *arguments: Any) -> bool:
            self.heard = arguments[-1]
            return True

    one = Elsewhere()
    monkeypatch.setattr(refining, "shared", lambda: one)
    model = planned(budget="60% of activations", strategy=rematplan.Auto(gap=-1.0))
    assert model.plan.status == "refining"
    assert str(model.plan).endswith("refining")
    assert plan_to_json(model.plan)["status"] == "feasible"
    one.heard(None, True)
    assert model.plan.status in ("feasible", "optimal")
