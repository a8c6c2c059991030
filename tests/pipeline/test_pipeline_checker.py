"""A pipeline file can be replayed from its documentation alone, with Python's standard library."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline_checker
import pytest
from test_pipeline_plan import AMPLE, chained, search

from rematplan.planner.pipeline.pipeline_file import pipeline_to_json
from rematplan.planner.pipeline.timeline import Link

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "interleaved-zb", "dualpipev", "dataflow")


def planned(name: str) -> dict[str, Any]:
    found = search(chained(9), name, AMPLE, optimizer=2.0, link=Link(2.0, 256.0), overhead=0.5).run()
    data: dict[str, Any] = json.loads(json.dumps(pipeline_to_json(found)))
    return data


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_documented_rules_give_the_figures_of_the_file(name: str) -> None:
    data = planned(name)
    found = pipeline_checker.check(data)
    assert found["peaks"] == data["peaks"]
    assert found["makespan"] == pytest.approx(data["makespan"], rel=1e-12)
    assert found["bubble"] == pytest.approx(data["bubble"], abs=1e-12)


def waits(data: dict[str, Any]) -> None:
    data["actions"][0].reverse()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(budget=max(data["peaks"]) - 1), "above the budget"),
        (lambda data: data.update(makespan=data["makespan"] * 1.001), "makespan is"),
        (lambda data: data["plans"][0].update(kept_bytes=data["plans"][0]["kept_bytes"] - 1), "peaks is"),
        (waits, "deadlock"),
    ],
)
def test_a_false_file_is_refused(change: Callable[[dict[str, Any]], None], text: str, tmp_path: Path) -> None:
    data = planned("1f1b")
    change(data)
    (tmp_path / "pipeline.json").write_text(json.dumps(data))
    command = [sys.executable, "-S", pipeline_checker.__file__, str(tmp_path / "pipeline.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert text in done.stderr


def test_every_field_of_a_plan_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for data in map(planned, ("zbv", "dataflow")):
        names = {*data, *data["plans"][0], *data["times"][0], *data["link"]}
        assert [name for name in sorted(names) if f"`{name}`" not in documented and name != "format"] == []
