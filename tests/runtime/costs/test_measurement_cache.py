"""Laws of the file of measured costs: it is read again only when it has changed, nothing that was saved is lost, and
what another process has written counts."""

import json
from pathlib import Path

import pytest

from rematplan.runtime.costs import measurement_cache
from rematplan.runtime.costs.measurement_cache import load, save
from rematplan.runtime.graph.call_cost import CallCost

COSTS = {"a": CallCost(1.5, 2, (3, 0), 4), "b": CallCost(2.5)}


def test_costs_are_read_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "profile.json", COSTS)
    monkeypatch.setattr(measurement_cache, "_contents", {})  # another process
    assert load(tmp_path / "profile.json", CallCost, "abc") == COSTS


def test_costs_are_known_though_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("no folder")
    for found in COSTS.items():
        save(tmp_path / "folder" / "profile.json", dict([found]))
    assert load(tmp_path / "folder" / "profile.json", CallCost, "abc") == COSTS


def test_a_file_is_read_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads = tmp_path / "profile.json", list[Path]()
    save(file, COSTS)
    read = measurement_cache._read
    monkeypatch.setattr(measurement_cache, "_read", lambda path: [reads.append(path), read(path)][1])
    for _ in range(3):
        assert load(file, CallCost, "abc") == COSTS
    assert reads == []
    file.write_text(json.dumps({"c": [7.0, 0, [], 0]}))
    assert load(file, CallCost, "abc") == {"c": CallCost(7.0)}
    assert reads == [file]


def test_what_is_not_yet_written_outlives_what_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile.json"
    monkeypatch.setattr(measurement_cache, "SHARE", 10**9)
    save(file, {"a": COSTS["a"]})
    save(file, {"b": COSTS["b"]})
    assert list(json.loads(file.read_text())) == ["a"]
    file.write_text(json.dumps({"c": [7.0, 0, [], 0]}))
    assert load(file, CallCost, "abc") == {"b": COSTS["b"], "c": CallCost(7.0)}
    measurement_cache._write_all()
    assert sorted(json.loads(file.read_text())) == ["b", "c"]


def test_what_is_loaded_is_the_callers(tmp_path: Path) -> None:
    save(tmp_path / "profile.json", COSTS)
    load(tmp_path / "profile.json", CallCost, "abc").clear()
    assert load(tmp_path / "profile.json", CallCost, "abc") == COSTS


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "profile.json", {**COSTS, "kept": True})
    assert load(tmp_path / "profile.json", CallCost, ["b", "kept", "missing"]) == {"b": COSTS["b"]}
    assert load(tmp_path / "profile.json", bool, ["b", "kept"]) == {"kept": True}
