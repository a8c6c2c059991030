"""The command plan: budgets, files and output; every plan passes the independent checker."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rematplan import api
from rematplan.ir import load_problem, show_bytes
from rematplan.planner.core.strategy import FamilyStrategy
from rematplan.planner.registry import STRATEGIES

UNET = ("unet", "--dim", "batch=4", "--dim", "image=64", "--dim", "width=4", "--costs", "t4")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_plan_is_accepted_by_the_checker(strategy, call, checker, problem, tmp_path) -> None:
    plan = tmp_path / "plan.json"
    result = call("plan", problem, "--budget", "min", "--strategy", strategy, "-o", plan, "--json")
    assert result.status == 0, result.err
    found, said = checker.check_files(problem, plan), result.data
    assert found["peak"] == said["peak"] <= said["budget"]
    assert found["reruns"] == said["ops_recomputed"]
    assert found["overhead"] == pytest.approx(said["overhead"])


def test_the_budget_min_states_what_bounds_the_peak(call, problem) -> None:
    least = ("plan", problem, "--budget", "min", "-S", "time_limit=0.2")
    said = call(*least, "--json").data
    cause = said["peak_cause"]
    parts = ("reads", "writes", "workspace")
    assert cause["inputs"] + cause["others"] + sum(cause["at"][p] for p in parts) == said["peak"]
    assert cause["floor"] <= said["peak"]
    assert "proven least" in call(*least).out
    refusal = call("plan", problem, "--budget", str(cause["floor"] - 1), "-S", "time_limit=0.2")
    assert refusal.status == 3
    assert f"the proven least is {show_bytes(cause['floor'])}" in refusal.err


def test_phases_that_contradict_the_graph_are_noted(call, problem, tmp_path, caplog) -> None:
    data = json.loads(problem.read_text())
    for at, op in enumerate(data["ops"]):
        op["phase"] = "forward" if at < 4 else "backward"
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(data))
    asked = ("--budget", "least", "--strategy", "chen_sqrt")
    right, found = (call("plan", path, *asked, "--json").data for path in (problem, wrong))
    assert right["notes"] == []
    (note,) = found["notes"]
    assert "contradict the order in which the graph reads its tensors" in note
    assert found["peak"] <= 1.01 * right["peak"]
    assert note in " ".join(call("plan", wrong, *asked).out.split())
    api.plan(load_problem(wrong), found["peak"], "chen_sqrt")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [note]


def test_an_onnx_file_gives_a_plan_and_a_problem_file(call, checker, onnx_file, tmp_path) -> None:
    plan, problem = tmp_path / "plan.json", tmp_path / "problem.json"
    result = call(
        *(
            "plan",
            onnx_file,
            *("--dim", "batch=16", "--costs", "a100", "--budget", "85%", "--strategy", "exact_dp"),
        ),
        *("-o", plan, "--problem-out", problem, "--json"),
    )
    assert result.status == 0, result.err
    assert checker.check_files(problem, plan)["peak"] == result.data["peak"]
    assert json.loads(plan.read_text())["budget"] == int(0.85 * result.data["no_recompute_peak"])
    again = call("plan", problem, "--budget", "85%", "--strategy", "exact_dp", "--json").data
    assert (again["peak"], again["budget"]) == (result.data["peak"], result.data["budget"])


def test_split_sums_to_the_peak(call) -> None:
    said = call("plan", *UNET, "--budget", "80%", "--json").data
    for split, peak in (("split", "peak"), ("split_no_recompute", "no_recompute_peak")):
        assert {"parameters", "buffers", "batch", "activations", "gradients", "workspace"} <= set(said[split])
        assert sum(said[split].values()) == said[peak]
    assert said["split"]["activations"] < said["split_no_recompute"]["activations"]


def test_the_table_lists_the_memory_by_kind(call) -> None:
    result = call("plan", *UNET, "--budget", "80%")
    for words in (
        *("parameters", "buffers", "batch", "activations", "gradients", "workspace", "overhead"),
        "no recompute",
    ):
        assert words in result.out
    assert result.err == ""


def test_profiled_costs_are_the_default_and_count_workspace(call) -> None:
    said = call("plan", *UNET[:-2], "--budget", "100%", "--json").data
    roofline = call("plan", *UNET, "--budget", "100%", "--json").data
    assert said["no_recompute_peak"] > roofline["no_recompute_peak"]


def test_a_budget_below_the_smallest_peak_is_refused(call, refused, problem) -> None:
    for strategy in STRATEGIES:
        low = call("plan", problem, "--budget", "1MB", "--strategy", strategy)
        refused(low, 3)
        smallest = int(re.search(r"smallest found[^(]*\((\d+) bytes\)", low.err)[1])
        # The others may find more or less in another search.
        family = issubclass(STRATEGIES[strategy], FamilyStrategy)
        enough = smallest if family else smallest * 11 // 10
        assert call("plan", problem, "--budget", enough, "--strategy", strategy).status == 0
        if family:
            refused(call("plan", problem, "--budget", smallest - 1, "--strategy", strategy), 3)


def test_an_infeasible_budget_writes_no_plan(call, problem, tmp_path) -> None:
    assert call("plan", problem, "--budget", "0%", "-o", tmp_path / "plan.json").status == 3
    assert not list(tmp_path.iterdir())


def test_more_memory_never_costs_more_time(call, problem) -> None:
    overheads = []
    for percent in (100, 90, 80, 70, 60):
        result = call("plan", problem, "--budget", f"{percent}%", "--json", "--strategy", "exact_dp")
        if result.status == 0:
            overheads.append(result.data["overhead"])
    assert len(overheads) > 2
    assert overheads == sorted(overheads)


def test_quiet_prints_nothing(call, problem, tmp_path) -> None:
    result = call("plan", problem, "--budget", "90%", "--quiet", "-o", tmp_path / "plan.json")
    assert (result.status, result.out, result.err) == (0, "", "")
    assert (tmp_path / "plan.json").is_file()


def test_options_reach_the_strategy(call, refused, problem) -> None:
    base = ("plan", problem, "--budget", "70%")
    for objective in ("time", "memory"):
        assert call(*base, "--strategy", "exact_dp", "-S", f"objective={objective}").status == 0
    refused(call(*base, "--strategy", "exact_dp", "-S", "objective=space"), 2)
    refused(call(*base, "--strategy", "chen_sqrt", "-S", "objective=time"), 2)
    refused(call(*base, "--strategy", "exact_dp", "-S", "ticks=many"), 2)
    limited = call(*base, "--strategy", "exact_dp", "-S", "max_lower_sets=3")
    refused(limited, 2)
    assert "approx_dp" in limited.err


def test_a_problem_without_a_backward_is_planned(call, checker, tmp_path) -> None:
    problem, plan = tmp_path / "p.json", tmp_path / "plan.json"
    ops = [
        {"name": "f", "reads": ["x"], "writes": ["a"], "cost": 1},
        {"name": "g", "reads": ["a"], "writes": ["b"], "cost": 2.5},
    ]
    tensors = [{"name": n, "bytes": 10} for n in "xab"]
    data = {"format": "rematplan.problem/1", "name": "[red]\ud800 ops", "tensors": tensors, "inputs": ["x"]}
    problem.write_text(json.dumps(data | {"outputs": ["b"], "ops": ops}))
    result = call("plan", problem, "--budget", "30", "-o", plan)
    assert result.status == 0
    assert "[red]" in result.out  # a name is text, not markup
    assert checker.check_files(problem, plan)["peak"] == 30
    assert call("curve", problem).status == 0


def test_problem_files_are_planned_without_loading_torch(problem) -> None:
    program = (
        "import sys\nfrom rematplan.cli import main\n"
        f"assert main(['plan', {str(problem)!r}, '--budget', '90%', '-S', 'time_limit=0.3']) == 0\n"
        "assert not {'torch', 'onnx', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_plans_are_written_through_pipes_and_links(call, problem, tmp_path) -> None:
    arguments = ["plan", str(problem), "--budget", "90%", "--quiet", "--strategy", "chen_greedy"]
    program = [sys.executable, "-m", "rematplan", *arguments]
    piped = subprocess.run([*program, "-o", "/dev/stdout"], check=True, capture_output=True)
    assert json.loads(piped.stdout)["format"] == "rematplan.plan/1"
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert call(*arguments, "-o", link).status == 0
    assert link.is_symlink()
    assert json.loads(target.read_text()) == json.loads(piped.stdout)
    assert {p.name for p in tmp_path.iterdir()} == {"target.json", "link.json"}


def test_planning_is_deterministic(call, problem, tmp_path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for path in (first, second):
        assert (
            call("plan", problem, "--budget", "75%", "--strategy", "exact_dp", "-o", path, "--quiet").status
            == 0
        )
    assert first.read_bytes() == second.read_bytes()


def test_python_m_rematplan_runs(problem: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rematplan", "plan", str(problem), "--budget", "1", "--strategy", "store_all"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
