"""Wrong arguments and broken files give one line and the right exit status, no traceback, and no partial files."""

import errno
import json
import math
import signal
from contextlib import suppress
from itertools import pairwise

import pytest

from rematplan import api
from rematplan.ir import UsageError
from rematplan.planner.auto.auto_strategy import Auto

PLAN = ("plan", "--budget", "90%")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("plan",),
        ("plan", "unet"),
        PLAN,
        (*PLAN, "unet", "x.json"),
        (*PLAN, "resnet51"),
        (*PLAN, ""),
        (*PLAN, "missing.onnx"),
        (*PLAN, "missing.json"),
        (*PLAN, "unet", "--dim", "batch=0"),
        (*PLAN, "unet", "--dim", "batch=-3"),
        (*PLAN, "unet", "--dim", "batch=two"),
        (*PLAN, "unet", "--dim", "batch=9" * 5000),
        (*PLAN, "unet", "--dim", "batch=٣"),
        (*PLAN, "unet", "--dim", "image=50"),
        (*PLAN, "resnet18", "--dim", "batch=1", "--dim", "image=32"),
        (*PLAN, "unet", "--dim", "batch"),
        (*PLAN, "unet", "--dim", "=3"),
        (*PLAN, "unet", "--loss", "hinge", "--dim", "image=32", "--dim", "width=2"),
        (*PLAN, "unet", "--costs", "guess", "--dim", "image=32", "--dim", "width=2"),
        (*PLAN, "unet", "--costs", "abacus", "--dim", "image=32", "--dim", "width=2"),
        (*PLAN, "unet", "--strategy", "magic"),
        (*PLAN, "unet", "--strateg", "auto"),
        (*PLAN, "unet", "-o", "no/such/folder/plan.json"),
        (*PLAN, "unet", "-o", "."),
        (*PLAN, "unet", "-o", "a.json", "--problem-out", "./a.json"),
        ("step", "unet", "--budget", "90%", "--steps", "0"),
        ("step", "--budget", "90%"),
        ("curve", "unet", "--strategy", "magic"),
        ("curve", "unet", "--budget", "half"),
        ("curve", "unet", "--strategy", "chen_sqrt", "-S", "objective=time"),
        ("curve", "unet", "--png", "x", "--csv", "x"),
        ("curve", "x.json", "--measure"),
        ("export", "unet"),
        ("export", "resnet51", "-o", "x.onnx"),
        ("export", "unet", "--dim", "image=17", "-o", "x.onnx"),
        ("export", "unet", "-o", "."),
    ],
    ids=lambda argv: " ".join(argv)[:60] or "nothing",
)
def test_wrong_arguments_are_refused_in_one_line(argv, call, refused, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call(*argv), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("--costs", "guess"), ("--costs", "missing.json"), ("--costs", "abacus")])
@pytest.mark.parametrize("command", [PLAN, ("compare",)], ids=lambda c: c[0])
def test_costs_are_checked_before_a_network_is_captured(call, refused, monkeypatch, command, option) -> None:
    monkeypatch.setattr(api, "load_step", None)
    result = call(*command, "unet", *option)
    refused(result, 2)
    if not option[1].endswith(".json"):
        known = "known: profile, roofline, the device models laptop-cpu, "
        assert f"unknown costs '{option[1]}'; {known}" in result.err


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "-1",
        "1.5",
        "0x10",
        "4 Gi B",
        "4G",
        "nan",
        "inf",
        "1e9",
        "60%%",
        "%",
        "½GiB",
        "٣MB",
        "9" * 30,
        "60 % of it",
        "of activations",
        "60 of activations",
        "60% activations",
        "60%of activations",
    ],
)
def test_malformed_budgets_are_refused_with_the_accepted_forms(budget, call, refused, problem) -> None:
    result = call("plan", problem, f"--budget={budget}")
    refused(result, 2)
    assert "4GiB" in result.err
    assert "50% of activations" in result.err


@pytest.mark.parametrize("strategy", ["auto", "approx_dp"])
def test_a_number_without_a_unit_is_asked_about(strategy, call, refused, problem) -> None:
    result = call("plan", problem, "--budget", "50", "--strategy", strategy)
    refused(result, 3)
    assert "budget 50 B (50 bytes)" in result.err
    assert result.err.endswith("was 50GiB or 50% (of the no-recompute peak) meant?\n")
    assert "meant" not in call("plan", problem, "--budget", "50B", "--strategy", strategy).err


@pytest.mark.parametrize("device", ["cuda:99", "meta", "h200"])
def test_a_missing_device_is_named(device, call, refused) -> None:
    result = call("plan", "chain", "--budget", "min", "--device", device)
    refused(result, 2)
    assert f"no device {device!r} here" in result.err


@pytest.mark.parametrize("unknown", ["resnet51", "magic"])
def test_unknown_names_list_the_known(unknown, call) -> None:
    assert "resnet50" in call(*PLAN, "resnet51").err
    assert "chen_sqrt" in call(*PLAN, "unet", "--strategy", "magic").err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"format": "rematplan.problem/2"}',
        '{"format": "rematplan.problem/1", "tensors": 3, "inputs": [], "outputs": [], "ops": []}',
        '{"format": "rematplan.problem/1", "tensors": [], "inputs": [], "outputs": ["x"], "ops": []}',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_broken_problem_files_are_refused(text, call, refused, tmp_path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    refused(call(*PLAN, path), 2)


@pytest.mark.parametrize(
    ("of", "edit", "words"),
    [
        (("ops", 0), {"reads": ["y"]}, "a cycle?"),
        (("ops", 1), {"writes": ["h"]}, "'h' is written twice"),
        (("tensors", 0), {"bytes": -1}, "bytes is -1"),
        (("ops", 0), {"workspace": -1}, "workspace is -1"),
        (("ops", 0), {"cost": -1.0}, "cost is -1.0"),
        (("ops", 0), {"cost": math.nan}, "NaN is not a number"),
        (("tensors", 0), {"bytes": 2**63}, "bytes is 9223372036854775808"),
        ((), {"outputs": ["z"]}, "output 'z' is not among the tensors"),
    ],
)
def test_invalid_problems_are_refused(of, edit, words, call, refused, tmp_path) -> None:
    names = ("x", "h", "y")
    problem = {
        "format": "rematplan.problem/1",
        "name": "p",
        "tensors": [{"name": name, "bytes": 4} for name in names],
        "inputs": ["x"],
        "outputs": ["y"],
        "ops": [{"name": f"op{a}", "reads": [a], "writes": [b], "cost": 1.0} for a, b in pairwise(names)],
    }
    at = problem
    for key in of:
        at = at[key]
    at.update(edit)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(problem))
    result = call(*PLAN, path)
    refused(result, 2)
    assert words in result.err


def test_broken_onnx_files_are_refused(call, refused, onnx_file, tmp_path) -> None:
    whole = onnx_file.read_bytes()
    for i, content in enumerate((b"", b"not onnx", whole[: len(whole) // 2], b"\x00" * 100)):
        path = tmp_path / f"{i}.onnx"
        path.write_bytes(content)
        refused(call(*PLAN, path), 2)
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    refused(call(*PLAN, folder), 2)


def test_unbound_unknown_and_contradictory_dimensions_are_refused(call, refused, onnx_file) -> None:
    unbound = call(*PLAN, onnx_file, "--costs", "t4")
    refused(unbound, 2)
    assert "batch" in unbound.err
    refused(call(*PLAN, onnx_file, "--dim", "bach=2"), 2)
    refused(call(*PLAN, onnx_file, "--dim", "batch=2", "--dim", "batch=3"), 2)
    refused(call(*PLAN, "vgg19", "--dim", "sides=2"), 2)


def test_model_options_are_refused_with_a_problem_file(call, refused, problem) -> None:
    for option in (("--dim", "batch=2"), ("--loss", "mse"), ("--costs", "roofline")):
        refused(call(*PLAN, problem, *option), 2)


def test_a_problem_file_is_refused_where_a_model_is_needed(call, refused, problem) -> None:
    result = call("step", problem, "--budget", "90%")
    refused(result, 2)
    assert "is not an ONNX model" in result.err


def test_an_interrupt_is_exit_status_130(call, refused, problem, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Auto, "plan", interrupt)
    refused(call(*PLAN, problem), 130)


@pytest.mark.parametrize("error", [None, KeyError("custom"), UsageError("cannot be traced")])
def test_an_interrupt_that_a_library_swallows_writes_nothing(
    error, call, refused, problem, monkeypatch, tmp_path
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores the signal
    real = Auto.plan

    def swallow(*args: object, **more: object) -> object:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if error is not None:
            raise error
        return real(*args, **more)

    monkeypatch.setattr(Auto, "plan", swallow)
    refused(call(*PLAN, problem, "-o", tmp_path / "plan.json"), 130)
    assert not any(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "x"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        RuntimeError("Storage size calculation overflowed with sizes=[8, 3, 2147483632, 2147483632]"),
    ],
)
def test_errors_of_the_operating_system_are_one_line(error, call, refused, problem, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Auto, "plan", fail)
    refused(call(*PLAN, problem), 2)


def test_bugs_raise_with_a_traceback(call, problem, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Auto, "plan", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        call(*PLAN, problem)


def test_a_failed_write_leaves_the_old_file(call, refused, problem, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", fail)
    refused(call(*PLAN, problem, "-o", path, "--quiet"), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "old"


def test_help_and_version_are_printed(call) -> None:
    assert call("--version").out.startswith("rematplan ")
    for command in ("info", "export", "plan", "curve", "step", "demo"):
        result = call(command, "--help")
        assert result.status == 0
        assert "--json" in result.out
        assert "--quiet" in result.out


def test_running_out_of_memory_is_one_line(call, refused, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(api, "load_step", fail)
    result = call(*PLAN, "vgg19")
    refused(result, 2)
    assert "smaller" in result.err


def test_json_errors_are_lines_too(call, refused, problem) -> None:
    refused(call("plan", problem, "--budget", "1", "--json"), 3)
    assert json.loads(call(*PLAN, problem, "--json").out)
