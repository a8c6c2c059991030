"""Laws of the file of measured costs: it is read again only when it has changed, nothing that was saved is lost, and
what another process has written counts."""

import json
from pathlib import Path

import pytest

from rematplan.runtime.costs import profile_cache
from rematplan.runtime.costs.profile_cache import load_costs, save_costs
from rematplan.runtime.graph.call_cost import CallCost

COSTS = {"a": CallCost(1.5, 2, (3, 0), 4), "b": CallCost(2.5)}


def test_costs_are_read_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_costs(tmp_path / "profile.json", COSTS)
    monkeypatch.setattr(profile_cache, "_contents", {})  # another process
    assert load_costs(tmp_path / "profile.json") == COSTS


def test_a_file_is_read_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads = tmp_path / "profile.json", list[Path]()
    save_costs(file, COSTS)
    read = profile_cache._read
    monkeypatch.setattr(profile_cache, "_read", lambda path: [reads.append(path), read(path)][1])
    for _ in range(3):
        assert load_costs(file) == COSTS
    assert reads == []
    file.write_text(json.dumps({"c": [7.0, 0, [], 0]}))
    assert load_costs(file) == {"c": CallCost(7.0)}
    assert reads == [file]


def test_what_is_not_yet_written_outlives_what_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile.json"
    monkeypatch.setattr(profile_cache, "SHARE", 10**9)
    save_costs(file, {"a": COSTS["a"]})
    save_costs(file, {"b": COSTS["b"]})
    assert list(json.loads(file.read_text())) == ["a"]
    file.write_text(json.dumps({"c": [7.0, 0, [], 0]}))
    assert load_costs(file) == {"b": COSTS["b"], "c": CallCost(7.0)}
    profile_cache._write_all()
    assert sorted(json.loads(file.read_text())) == ["b", "c"]


def test_what_is_loaded_is_the_callers(tmp_path: Path) -> None:
    save_costs(tmp_path / "profile.json", COSTS)
    load_costs(tmp_path / "profile.json").clear()
    assert load_costs(tmp_path / "profile.json") == COSTS
