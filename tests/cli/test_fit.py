"""`fit` says whether a training step fits, and the largest size that does: its peaks are those that are measured."""

import importlib.util
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training_peaks import training_peak

import rematplan
from rematplan.cli import main
from rematplan.cli.fit_models import _positional, sized_model
from rematplan.cli.output import Output
from rematplan.fitting.fit import answer
from rematplan.fitting.lengths import read_lengths
from rematplan.fitting.question import SizedModel, WithoutData, question, training
from rematplan.fitting.sizes import SizeSearch
from rematplan.ir import ModelError, UsageError
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.fake_weights import without_data

WIDTH, CLASSES = 256, 1600
SEARCH = rematplan.ExactDP()
ASKED = question("40MB", None, None, "server-cpu", None, SEARCH)
DEEP = question("40MB", "adamw", None, "h100", None, SEARCH)
TINY = [f"--dim={n}" for n in ("batch=2", "tokens=8", "width=16", "depth=1", "vocabulary=32")]


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematplan.fitting.question.SEARCH", SEARCH)


def network() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def rows(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(size, WIDTH),)


def measured(
    size: int, make: Callable[..., torch.optim.Optimizer], budget: int = 0, strategy: Any = SEARCH
) -> int:
    """The bytes at the peak of a training step that runs, with a plan if there is a budget, after one step."""
    model, batch, labels = network(), rows(size)[0], torch.randint(CLASSES, (size,))
    optimizer = make(model.parameters())

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(x), y)

    run: Any = WithLoss()
    if budget:
        run = rematplan.plan_module(
            run, (batch, labels), budget=budget, reserved=[optimizer], refine=False, strategy=strategy
        )

    return training_peak(run, (batch, labels), optimizer)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_peaks_are_those_that_are_measured(name: str) -> None:
    optimizer = getattr(torch.optim, name)
    whole = rematplan.fit(
        network, rows, memory="1GB", size=2048, optimizer=optimizer, costs="profile", largest=False
    )
    assert whole.fits
    assert measured(2048, optimizer) == pytest.approx(whole.here.without, rel=0.01)
    memory = (whole.here.without + 3 * whole.here.least) // 4
    tight = rematplan.fit(
        network, rows, memory=memory, size=2048, optimizer=name.lower(), costs="profile", largest=False
    )
    assert tight.fits
    assert tight.here.without > memory >= tight.here.planned
    assert sum(tight.split["planned"].values()) == tight.here.planned
    assert sum(tight.split["without"].values()) == tight.here.without
    assert measured(2048, optimizer, memory) == pytest.approx(tight.here.planned, rel=0.01)


def test_the_largest_batch_is_the_one_that_real_runs_find() -> None:
    memory = 6_000_000
    found = rematplan.fit(network, rows, memory=memory, size=8, optimizer="sgd", costs="profile")
    assert found.largest is not None
    assert found.largest.without is not None
    assert found.largest.planned is not None
    assert found.largest.impossible is not None
    low, high = 1, 1000
    while high - low > 1:
        middle = (low + high) // 2
        fits = measured(middle, torch.optim.SGD) <= memory
        low, high = (middle, high) if fits else (low, middle)
    assert abs(found.largest.without.size - low) <= 1  # autograd's order of ops in one node differs by a bias
    assert low <= found.largest.planned.size < found.largest.impossible
    search = rematplan.Auto(moves=10_000)  # with costs measured anew, dynamic programs find other plans
    assert measured(found.largest.planned.size, torch.optim.SGD, memory, search) <= memory


@pytest.mark.parametrize(("proven", "searches"), [(24, 1), (40, 7)])
def test_the_largest_size_that_is_possible_is_planned_first(
    proven: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def row(size: int) -> SimpleNamespace:
        planned.append(size)
        return SimpleNamespace(fits=size <= 24)

    model = SizedModel(
        "net", "batch", 8, lambda n: training(*without_data(network, lambda: rows(n)), ASKED, None)
    )
    search = SizeSearch(model, ASKED, lambda *_: None)
    monkeypatch.setattr(search, "row", row)
    assert search._planned(1, proven) == 24
    assert planned[0] == proven
    assert len(planned) == searches


def test_a_gpu_has_a_margin_and_steps_of_optimizers_over_lists() -> None:
    cpu = rematplan.fit(network, rows, memory="1GB", optimizer="adamw", costs="server-cpu", largest=False)
    gpu = rematplan.fit(network, rows, memory="1GB", optimizer="adamw", costs="h100", largest=False)
    assert not cpu.margin
    assert cpu.split["without"]["margin"] == 0
    assert sum(gpu.margin.values()) == gpu.split["without"]["margin"] > 64 << 20
    parameters = sum(p.nbytes for p in network().parameters())
    assert gpu.split["without"]["optimizer's temporaries"] >= parameters


def test_types() -> None:
    def parameters(dtype: str | None) -> int:
        found = rematplan.fit(network, rows, memory="1GB", dtype=dtype, costs="h100", largest=False)
        return found.split["without"]["parameters"]

    assert parameters("bf16") * 2 == parameters("fp32") == parameters(None) == parameters("bf16-mixed")


def test_mixed_precision_of_a_gpu_computes_norms_in_float32() -> None:
    def activations(costs: str) -> int:
        found = rematplan.fit(
            lambda: nn.Sequential(*[nn.Linear(64, 64), nn.LayerNorm(64)] * 3, nn.Linear(64, 64)),
            lambda n: (torch.randn(n, 64),),
            memory="1GB",
            size=4096,
            dtype="bf16-mixed",
            costs=costs,
            loss="mse",
            largest=False,
        )
        return found.split["without"]["activations"]

    assert activations("h100") > activations("server-cpu")


def test_the_command_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    chain = ["fit", "chain", "--dim", "batch=4", "--dim", "depth=3", "--costs", "h100"]
    assert main([*chain, "--memory", "80MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fits: chain, batch 4, in 80.00 MiB: ")
    assert lines[0].endswith(" to spare, without a plan")
    assert lines[-1].startswith("largest batch: ")
    assert lines[-1].endswith("on proven impossible")
    assert main([*chain, "--memory", "64MiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["verdict"].startswith("does not fit: chain")


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output().show("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1


def layered(width: Callable[[int], int]) -> SizedModel:
    def stack(depth: int) -> nn.Module:
        widths = [16, *map(width, range(depth))]
        pairs = pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout()) for a, b in pairs))

    def at(depth: int) -> WithoutData:
        return training(
            *without_data(lambda: stack(depth), lambda: [torch.randn(8, 16)]), DEEP, "cross_entropy"
        )

    return SizedModel("stack", "depth", 3, at)


def test_the_number_of_layers_is_a_size() -> None:
    asked = question("60kB", "sgd", None, "server-cpu", None, SEARCH)
    largest = answer(layered(lambda _: 16), asked, True).largest
    assert largest.without.size <= largest.planned.size < largest.impossible


@pytest.mark.parametrize("name", ["gpt12", "stack"])
def test_the_problem_of_equal_layers_is_the_one_that_is_captured(name: str) -> None:
    dims = {"batch": 2, "tokens": 8, "width": 64, "vocabulary": 32}
    made = layered(lambda _: 16) if name == "stack" else sized_model(name, "depth", dims, DEEP, None)
    few, all_ = (SizeSearch(made, DEEP, lambda *_: None) for _ in range(2))
    all_.captured(8)
    for plain in (False, True):
        found, true = (of.plain(of.problem(8)) if plain else of.problem(8) for of in (few, all_))
        assert found.structure == true.structure
        assert [op.cost for op in found.ops] == pytest.approx([op.cost for op in true.ops])
        assert [op.workspace for op in found.ops] == [op.workspace for op in true.ops]
        assert no_recompute(found).peak == no_recompute(true).peak
    assert list(few._captured) == [5, 6, 7]
    assert few.least(8) == all_.least(8)


def test_layers_that_differ_are_captured() -> None:
    search = SizeSearch(layered(lambda k: 16 + k), DEEP, lambda *_: None)
    assert search.problem(9).input_bytes > search.problem(8).input_bytes
    assert {8, 9} <= {*search._captured}


def test_an_onnx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    assert main(["export", "chain", "--dim", "depth=3", "-o", str(path), "--quiet"]) == 0
    assert main(["fit", str(path), "--memory", "80MB", "--dim", "batch=4", "--costs", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest"]["impossible"] > 4


FACTORY = """
import torch
def plain():
    return torch.nn.Linear(1000, 1000), torch.randn(4, 1000)
def sized(tokens=3):
    return torch.nn.Linear(50, 50), {"input": torch.randn(2, tokens, 50)}
def values():
    return torch.nn.Linear(int(torch.ones(1)), 1), torch.ones(1, 1)
def ends():
    raise SystemExit(0)
def scalar():
    return torch.nn.Tanh(), torch.ones(())
class Pair(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).view(2, 4)
def pair():
    return Pair(4, 4), torch.randn(2, 4)
def lazy():
    return torch.nn.LazyLinear(4), torch.randn(2, 4)
def compiled():
    return torch.compile(torch.nn.Linear(4, 4)), torch.randn(2, 4)
def named(batch="many"):
    return torch.nn.Linear(4, 4), torch.randn(2, 4)
class Several(torch.nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return {"scores": scores, "loss": scores.square().mean()}
def several():
    return Several(1000, 1000), torch.randn(1000, 1000)
"""


def test_a_function_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_nets.py").write_text(FACTORY)
    (tmp_path / "fails_to_load.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    fit = ["fit", "--memory", "100MB", "--costs", "server-cpu", "--json"]
    assert main([*fit, "my_nets:plain"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dimension"], found["here"]["size"]) == ("batch", 4)
    assert main([*fit, "my_nets:plain", "--dim", "batch=6"]) == 0
    assert json.loads(capsys.readouterr().out)["here"]["size"] == 6
    assert main([*fit, "my_nets:sized", "--vary", "tokens"]) == 0
    assert json.loads(capsys.readouterr().out)["here"]["size"] == 3
    for wrong, words in {
        "my_nets:values": "on the meta device",
        "my_nets:ends": "SystemExit",
        "my_nets:scalar": "the first input is a scalar",
        "my_nets:missing": "write package.module:function",
        "my_nets:lazy": "call it once before planning",
        "my_nets:compiled": "is compiled",
        "my_nets:named": "state the size of batch",
        "fails_to_load:made": "ZeroDivisionError",
        ":made": "is not of the form package.module:function",
        "../my_nets:plain": "write package.module:function",
    }.items():
        assert main([*fit, wrong]) == 2
        assert words in capsys.readouterr().err
        assert capsys.readouterr().out == ""
    assert main([*fit, "my_nets:plain", "--vary", "tokens"]) == 2
    assert "has no parameter 'tokens'" in capsys.readouterr().err
    assert main([*fit, "my_nets:several", "--optimizer", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["here"]["without"] > 25_000_000  # a cross entropy needs 20
    assert main([*fit, "my_nets:pair"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["largest"] is None
    assert "no largest batch is stated" in found["notes"][0]


def test_a_configuration_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    config = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128}
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}))
    fit = ["fit", str(path), "--memory", "4MB", "--costs", "server-cpu", "--dtype", "bf16", "--json"]
    assert main([*fit, "--dim", "batch=2", "--dim", "tokens=16", "--vary", "tokens"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["largest"]["without"]["size"] == 128  # the longest sequence of the model
    assert found["largest"]["impossible"] is None
    assert main([*fit, "--dim", "tokens=256"]) == 2
    assert "has 128 tokens" in capsys.readouterr().err
    for changed, words in (
        ({"architectures": ["LlamaModel"]}, "architecture is LlamaModel"),
        ({"architectures": ["BertForMaskedLM"]}, "cannot be made from this configuration"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "is no configuration file of a model"),
        ({"hidden_size": "wide"}, "is no configuration file of a model"),
    ):
        stated = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config, **changed}
        path.write_text(json.dumps(stated))
        assert main(fit) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["unet", "--memory", "50%"], "memory '50%' is not possible here"),
        (["unet", "--memory", "1GB", "--optimizer", "adan"], "unknown optimizer 'adan'"),
        (
            ["gpt12", "--memory", "1GB", "--optimizer", "muon", *TINY],
            "the bytes of this optimizer are not known",
        ),
        (
            ["gpt12", "--memory", "1GB", "--optimizer", "lbfgs", *TINY],
            "the bytes of this optimizer are not known",
        ),
        (["unet", "--memory", "1GB", "--costs", "abacus"], "unknown"),
        (["unet", "--memory", "1GB", "--vary", "tokens"], "no such dimension"),
        (["unet", "--memory", "1GB", "--max-overhead", "much"], "not a share"),
        (["config.json", "--memory", "1GB"], "no such file"),
    ],
)
def test_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert any(word in error for word in words.split("|"))
    assert error.count("\n") == 1


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        rematplan.fit(network, rows, memory="1GB", dtype="int8")


def test_the_longest_sample_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    for text in ("16\n24\n32\n24\n", "32, 1\n16 1\n24 2\n\n8 0\n"):
        file.write_text(text)
        found = read_lengths(file)
        assert (found.longest, found.samples, found.longer_than(16), found.longer_than(32)) == (32, 4, 3, 0)
    sizes = [one for one in TINY if "tokens" not in one]
    stated = [*sizes, "--optimizer", "sgd", "--costs", "laptop-cpu", "--lengths", str(file)]
    assert main(["fit", "gpt12", "--memory", "400kB", *stated]) == 0
    assert "the longest of 4 samples has tokens 32" in capsys.readouterr().out
    assert main(["fit", "gpt12", "--memory", "200kB", *stated, "--vary", "tokens", "--json"]) in (0, 1)
    shown = json.loads(capsys.readouterr().out)
    assert shown["here"]["size"] == 32
    assert main(["fit", "gpt12", "--memory", "2MB", *stated, "--dim", "tokens=8"]) == 2
    assert "leave out --dim tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no length"),
        ("8 8 8", "line 1"),
        ("8\n-3", "line 2"),
        ("0", "line 1"),
        ("9" * 5000, "line 1"),
        ("8 ٣", "line 1"),
    ],
)
def test_wrong_files_of_lengths_are_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_lengths(file)


def test_sizes_beyond_this_machine_are_refused_in_words() -> None:
    with pytest.raises(ModelError, match="this machine has not so much; state smaller sizes"):
        rematplan.fit(
            lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            lambda n: (torch.empty(n, 4),),
            memory="1GB",
            size=1 << 44,
            largest=False,
        )


def test_samples_per_second_are_those_of_the_planned_step() -> None:
    found = rematplan.fit(network, rows, memory="40MB", size=16, costs="server-cpu", strategy=SEARCH)
    assert found.here.rate is None  # the dimension is any size
    model = SizedModel(
        "net", "batch", 16, lambda n: training(*without_data(network, lambda: rows(n)), ASKED, None)
    )
    found = answer(model, ASKED, True)
    assert found.here.rate == pytest.approx(16 / found.here.seconds)
    fastest = found.largest.fastest
    assert fastest.fits
    assert fastest.rate >= max(found.largest.without.rate, found.largest.planned.rate)


def test_models_of_timm_are_made_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    has_timm = importlib.util.find_spec("timm") is not None
    status = main(["fit", "timm/resnet18", "--memory", "40GB", "--dim", "image=64", "--costs", "h100"])
    assert status == (0 if has_timm else 2)
    said = capsys.readouterr()
    assert ("fits: resnet18" in said.out) if has_timm else ("needs the package timm" in said.err)


@pytest.mark.parametrize("given", [None, 3, (), [1.0]])
def test_inputs_that_are_no_tensors_are_refused(given: object) -> None:
    with pytest.raises(UsageError, match="the inputs must be tensors"):
        _positional(network(), given)
