"""The command pipeline: tables, files and refusals."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from zoo_arguments import zoo_arguments

from rematplan.cli import main
from rematplan.ir import ProblemError, UsageError
from rematplan.pipeline.options import parse_link
from rematplan.pipeline.schedules import stated_schedule
from rematplan.planner.pipeline.choose_cuts import PipelineSearch
from rematplan.planner.pipeline.pipeline_file import PlannedPipeline, load_pipeline
from rematplan.planner.pipeline.timeline import Link
from rematplan.plans import op_costs
from rematplan.report.plot_timeline import timeline_figure


def small(**sizes: int) -> tuple[str, ...]:
    """The arguments of a small network; ``sizes`` replaces some of its sizes."""
    return zoo_arguments("vit_s", **{"depth": 4, "width": 32, "image": 32, "batch": 2} | sizes)


SMALL = small()
LIMIT = ("--microbatches", "4", "-S", "time_limit=0.1")
FOUR = (*SMALL, *LIMIT)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "pipe.json"
    more = ("--stages", "2", "--budget", "8GiB", "--link", "1GB/s,5us", "--quiet", "-o", str(path))
    assert main(["pipeline", *FOUR, *more]) == 0
    return path


def test_tables_and_the_timeline_are_shown(call, tmp_path) -> None:
    png = tmp_path / "timeline.png"
    done = call(
        "pipeline",
        *small(batch=32),
        *LIMIT,
        "--stages",
        2,
        "--budget",
        "100%",
        "--optimizer",
        "adam",
        "--png",
        png,
    )
    assert done.status == 0, done.err
    for text in (
        "in flight",
        "promised",
        "extra time",
        "makespan",
        "bubble",
        "(P - 1) / (M + P - 1)",
        "proven floor",
    ):
        assert text in done.out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_no_text_of_the_timeline_is_cut_off(call, monkeypatch, tmp_path) -> None:
    made: list[PlannedPipeline] = []
    monkeypatch.setattr("rematplan.cli.pipeline.save_pipeline", lambda plan, path: made.append(plan))
    call("pipeline", *FOUR, "--stages", 2, "--budget", "8GiB", "-o", tmp_path / "pipe.json")
    (plan,) = made
    for name in ("net", "a long name " * 20):
        figure = timeline_figure(replace(plan, problem=name, budget=2 * max(plan.peaks)))
        figure.draw_without_rendering()
        texts = [*figure.texts, *(axes.xaxis.label for axes in figure.axes)]
        texts += [text for axes in figure.axes for text in axes.get_legend().get_texts()]
        for text in texts:
            box = text.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text


def test_what_torch_allocates_before_the_first_step_depends_on_its_version(call, monkeypatch) -> None:
    found = []
    for opening in (0, 2**30):
        monkeypatch.setattr("rematplan.pipeline.planning.OPENING", opening)
        found.append(call("pipeline", *FOUR, "--stages", 2, "--budget", "8GiB", "--json").data)
    assert [{one["opening"] for one in said["plans"]} for said in found] == [{0}, {2**30}]
    assert min(found[1]["peaks"]) > 2**30 > max(found[0]["peaks"])


def test_json_output_equals_the_file(call, file) -> None:
    said = call("pipeline", *FOUR, "--stages", 2, "--budget", "8GiB", "--link", "1GB/s,5us", "--json").data
    kept = json.loads(file.read_text())
    assert said["format"] == kept["format"] == "rematplan.pipeline/1"
    assert {k: said[k] for k in ("schedule", "actions", "peaks", "in_flight")} == {
        k: kept[k] for k in ("schedule", "actions", "peaks", "in_flight")
    }
    assert said["in_flight"] == [2, 1]
    assert said["model"]["sizes"] == {"batch": 2, "image": 32, "width": 32, "depth": 4}
    assert all(peak <= 2**33 for peak in said["peaks"])


def test_a_rank_reads_what_it_needs(file) -> None:
    said, read = json.loads(file.read_text()), load_pipeline(file)
    assert asdict(read) == {name: said[name] for name in asdict(read)} | {
        "names": tuple(said["names"]),
        "in_flight": tuple(said["in_flight"]),
    }


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("format", "rematplan.plan/1", "not a rematplan.pipeline/1 file"),
        ("names", None, "names is 'None', not of type list"),
        ("names", [], "2 stages need as many numbers in flight, and one name fewer"),
        ("names", [7], "names is '7', not of type str"),
        ("stages", 10**9, "1000000000 stages need as many numbers in flight"),
        ("stages", True, "stages is 'True', not of type int"),
        ("microbatches", 0, "there are 2 stages and 0 micro-batches"),
        ("budget", "1", "budget is '1', not of type int"),
        ("in_flight", [2], "2 stages need as many numbers in flight"),
        ("in_flight", [1.5], "in_flight is '1.5', not of type int"),
        ("model", "vit_s", "model is 'vit_s', not of type dict"),
    ],
)
def test_changed_files_are_refused(file, tmp_path, field, value, text) -> None:
    data = json.loads(file.read_text()) | {field: value}
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ProblemError, match=rf"bad.json: .*{text}"):
        load_pipeline(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schedule": "best"}, "unknown schedule 'best'; known: gpipe"),
        ({"microbatches": 10**9}, "are too many to simulate"),
        ({"ranks": 1}, "2 stages of 1f1b have 2 ranks, not 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(file, changes, text) -> None:
    with pytest.raises(UsageError, match=text):
        stated_schedule(replace(load_pipeline(file), **changes))


def test_a_file_without_a_field_that_a_rank_reads_is_refused(file, tmp_path) -> None:
    whole = json.loads(file.read_text())
    for name in asdict(load_pipeline(file)):
        (tmp_path / "bad.json").write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        with pytest.raises(ProblemError, match=rf"bad.json: the pipeline: '{name}' is missing"):
            load_pipeline(tmp_path / "bad.json")


def test_a_rank_that_does_not_fit_is_named(call) -> None:
    done = call("pipeline", *small(depth=1), *LIMIT, "--stages", 2, "--budget", "100KiB", "--cuts", "norm")
    assert done.status == 3
    assert "rank 0: budget 100.00 KiB" in done.err
    least = int(done.err.split("smallest found")[1].split("(")[1].split(" ")[0])
    again = call(
        "pipeline", *small(depth=1), *LIMIT, "--stages", 2, "--budget", least, "--cuts", "norm", "--json"
    )
    assert max(again.data["peaks"]) <= least


def test_cuts_are_at_the_named_modules_and_no_others_are_searched_for(call, monkeypatch) -> None:
    monkeypatch.setattr(PipelineSearch, "_promising", None)
    done = call("pipeline", *FOUR, "--stages", 3, "--budget", "1GiB", "--cuts", "blocks.1,blocks.3", "--json")
    assert done.data["names"] == ["blocks.1", "blocks.3"]
    assert done.data["stages"] == 3


@pytest.mark.parametrize("schedule", ["gpipe", "zbv", "dataflow", "auto"])
def test_all_schedules_can_be_planned(call, tmp_path, schedule) -> None:
    path = tmp_path / "pipe.json"
    more = ("--link", "1MB/s,5us") if schedule == "dataflow" else ()  # more micro-batches are in flight
    asked = (*FOUR, "--stages", 4, "--budget", "1GiB", "--schedule", schedule, *more)
    said = call("pipeline", *asked, "-o", path, "--json").data
    read = stated_schedule(load_pipeline(path))
    assert [[[a.kind, a.stage, a.microbatch] for a in row] for row in read.actions] == said["actions"]
    assert said["stages"] == 4
    assert schedule == "auto" or said["schedule"] == schedule
    if schedule == "auto":  # with links that take no time
        assert said["bubble"] < 3 / (4 + 3)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--schedule", "best"), "unknown schedule 'best'; known: gpipe"),
        (("--inverses",), "--inverses cannot be combined with --schedule 1f1b; they are for dataflow"),
        (("--cuts", "blocks.9"), "vit_s cannot be cut at 'blocks.9'; similar: blocks."),
        (("--cuts", "blocks.3,blocks.1"), "the cuts blocks.3, blocks.1 are not in the order"),
        (("--cuts", "blocks.1,blocks.2"), "2 stages need 1 cuts, not 2"),
        (("--optimizer", "best"), "unknown optimizer 'best'; known: none"),
        (("--link", "fast"), "link 'fast' is not understood"),
        (("--budget", "min"), "budget 'min' is not possible here; write 4GiB"),
        (("--budget", "4 of"), "a whole number of bytes or 60% (of the no-recompute peak)\n"),
        (("--stages", "3", "--schedule", "zbv"), "zbv has 2 stages on each rank"),
        (("--stages", "99", "--microbatches", "99"), "cannot be divided into 99 stages, only into"),
        (("--microbatches", "1"), "1f1b needs at least as many micro-batches as ranks"),
        (("-S", "gap=0.1"), "-S gap: pipelines have one option of this kind, time_limit"),
        (("-S", "time_limit=0"), "auto: time_limit is 0.0; it must be above 0"),
        (("--overhead", "-1"), "--overhead -1.0 is not a number"),
        (("--microbatches", "1000000"), "2 ranks with 1000000 micro-batches are too many to simulate"),
        (("--budget", "9999999999999GiB"), "is too large; a rank can have 1048576.00 GiB"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call, more, text) -> None:
    done = call("pipeline", *FOUR, "--stages", "2", "--budget", "1GiB", *more)
    assert done.status == 2
    assert text in done.err


def test_tied_weights_are_refused_by_name(call) -> None:
    small = (
        *("gpt12", "--dim", "depth=2", "--dim", "width=32", "--dim", "tokens=8", "--dim", "batch=1"),
        *("--costs", "roofline"),
    )
    done = call("pipeline", *small, "--stages", "2", "--microbatches", "2", "--budget", "1GiB")
    assert done.status == 2
    assert "stages cannot share embedding.weight, which several parts read; untie it" in done.err


def test_an_onnx_file_is_divided_into_stages(call, tmp_path) -> None:
    path = tmp_path / "r.onnx"
    call("export", "resnet18", "--dim", "image=32", "--dim", "width=8", "-o", path)
    more = ("--dim", "batch=2", "--costs", "roofline", "-S", "time_limit=0.1", "--microbatches", "4")
    said = call("pipeline", path, *more, "--stages", 2, "--budget", "1GiB", "--json").data
    assert len(said["names"]) == 1
    assert said["names"][0]


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("25GB/s,5us", Link(5.0, 25_000.0)),
        ("5us, 25GB/s", Link(5.0, 25_000.0)),
        ("1GiB/s", Link(0.0, 2**30 / 1e6)),
        ("2ms", Link(2000.0)),
        (None, Link()),
    ],
)
def test_links_are_read_from_text(text, link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["25", "0GB/s", "5 apples", "GB/s", "1..2us"])
def test_malformed_links_are_refused(text) -> None:
    with pytest.raises(UsageError, match="is not understood"):
        parse_link(text)


def test_a_reversible_network_keeps_little_in_a_dataflow(call) -> None:
    sizes = (
        *("--dim", "depth=4", "--dim", "width=16", "--dim", "image=32"),
        *("--dim", "classes=10", "--dim", "batch=2", "--costs", "roofline"),
    )
    more = (
        "--microbatches",
        8,
        "--stages",
        2,
        *("--link", "50us", "--schedule", "dataflow", "-S", "time_limit=0.1"),
    )
    ample = call("pipeline", "revvit_s", *sizes, *more, "--budget", "1GiB", "--json").data
    tight = call("pipeline", "revvit_s", *sizes, *more, "--budget", "80%", "--json")
    assert tight.status == 0, tight.err
    assert [said["plans"][0]["kept_bytes"] for said in (ample, tight.data)] == [0, 0]
    assert ample["in_flight"] == tight.data["in_flight"] == [3, 1]


def test_measured_costs_are_the_default(call, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(op_costs, "priced", lambda step, costs, *more: asked.append(costs) or _stop())
    done = call("pipeline", *SMALL[:-2], "--microbatches", "4", "--stages", "2", "--budget", "1GiB")
    assert asked == ["profile"]
    assert done.err == "rematplan: enough\n"


def _stop() -> None:
    raise UsageError("enough")


def test_the_last_rank_holds_the_models_outputs_of_all_microbatches(call) -> None:
    """PyTorch keeps them to the end of a step."""
    small = ("lstm", "--dim", "batch=2", "--dim", "tokens=8", "--dim", "width=8", "--dim", "vocabulary=500")
    more = (
        "--costs",
        "roofline",
        "-S",
        "time_limit=0.1",
        "--stages",
        2,
        "--cuts",
        "head",
        "--budget",
        "1GiB",
    )
    rows = [call("pipeline", *small, *more, "--microbatches", m, "--json").data for m in (2, 6)]
    few, many = (said["plans"][1] for said in rows)
    outputs = 4 * 2 * 8 * 500
    assert (few["closing"], many["closing"]) == (2 * outputs, 6 * outputs)
    assert rows[1]["peaks"][1] - rows[0]["peaks"][1] >= 4 * outputs
