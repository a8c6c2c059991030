"""Export in training form writes the right file and changes nothing else."""

import stat
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from rematplan.models import ZOO, ZooError, build, example_inputs, export_onnx
from rematplan.models import export as export_module

pytestmark = pytest.mark.usefixtures("few_blocks")
TWINS = {
    *("resnet34", "resnet101", "resnet152", "densenet161", "vit_b", "gpt24", "roberta", "revnet110"),
    *("resnet18", "mobilenet_v2", "hybrid38", "revswin_t", "revbert"),
}
"""Networks of whose modules there is another network."""


def exported(name: str, path: Path, *, dynamic_batch: bool = True) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(1)
    model = build(name, **ZOO[name].tiny)
    export_onnx(model, example_inputs(name, **ZOO[name].tiny), path, dynamic_batch=dynamic_batch)
    return model, onnx.load(path)


def calls_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Counter[type]:
    """How often each kind of module is called."""
    calls: Counter[type] = Counter()
    for module in model.modules():
        module.register_forward_hook(lambda module, _args, _output: calls.update(type(module).__mro__))
    model(*inputs)
    return calls


@pytest.mark.parametrize("name", [name for name in ZOO if name not in TWINS])
def test_training_ops_are_kept(name: str, tmp_path: Path) -> None:
    model, file = exported(name, tmp_path / "m.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert [o.version for o in file.opset_import if o.domain == ""] == [17]
    ops = Counter(node.op_type for node in file.graph.node)
    calls = calls_of(model, example_inputs(name, **ZOO[name].tiny))
    for op, kind in (
        ("BatchNormalization", nn.BatchNorm2d),
        ("Conv", nn.Conv2d),
        ("ConvTranspose", nn.ConvTranspose2d),
        ("Dropout", nn.Dropout),
    ):
        assert ops[op] == calls[kind]
    assert ops["Gemm"] + ops["MatMul"] >= calls[nn.Linear]
    for node in file.graph.node:
        if node.op_type == "BatchNormalization":
            assert {a.name: a.i for a in node.attribute}["training_mode"] == 1
            assert len(node.output) == 3
    constants = {n.output[0]: n.attribute[0].t for n in file.graph.node if n.op_type == "Constant"}
    for node in file.graph.node:
        if node.op_type == "Dropout":
            assert numpy_helper.to_array(constants[node.input[2]])


@pytest.mark.parametrize("name", ["unet", "resnet18", "vgg19"])
def test_weights_and_statistics_are_the_models(name: str, tmp_path: Path) -> None:
    model, file = exported(name, tmp_path / "m.onnx")
    stored = {i.name: numpy_helper.to_array(i) for i in file.graph.initializer}
    wanted = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert set(stored) == set(wanted)
    for key, value in wanted.items():
        np.testing.assert_array_equal(stored[key], value.numpy(), err_msg=key)


@pytest.mark.parametrize(("dynamic", "wanted"), [(True, "batch"), (False, 2)])
def test_batch_dimension(dynamic: bool, wanted: str | int, tmp_path: Path) -> None:
    _, file = exported("unet", tmp_path / "m.onnx", dynamic_batch=dynamic)
    for value in (file.graph.input[0], file.graph.output[0]):
        first, *others = value.type.tensor_type.shape.dim
        assert (first.dim_param or first.dim_value) == wanted
        assert all(d.dim_value for d in others)


def test_model_and_random_state_are_untouched(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = build("vgg19", image=32, width=2)
    model.extra = nn.BatchNorm2d(3).eval()  # a mode of its own, which the exporter would overwrite
    mixed = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.BatchNorm2d(4).eval())
    for network in (model, mixed, mixed.eval()):
        modes = [m.training for m in network.modules()]
        state = {k: v.clone() for k, v in network.state_dict().items()}
        identities = [id(b) for b in network.buffers()]
        before = torch.get_rng_state()
        export_onnx(network, (torch.randn(2, 3, 32, 32, generator=torch.Generator()),), tmp_path / "m.onnx")
        assert torch.equal(before, torch.get_rng_state())
        assert [m.training for m in network.modules()] == modes
        assert [id(b) for b in network.buffers()] == identities
        for key, value in network.state_dict().items():
            assert torch.equal(value, state[key]), key


def test_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported("unet", tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")


def test_nothing_is_left_when_it_fails(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    old = tmp_path / "m.onnx"
    old.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="broken"):
        export_onnx(Broken(), (torch.zeros(1),), old)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert old.read_bytes() == b"old"
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_replaces_an_old_file_by_one_of_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    path.chmod(mode)
    exported("resnet18", path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_folder_or_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    model, inputs = build("resnet18", image=32, width=1), example_inputs("resnet18", 2, 32)
    with pytest.raises(IsADirectoryError):
        export_onnx(model, inputs, tmp_path)
    with pytest.raises(FileNotFoundError):
        export_onnx(model, inputs, tmp_path / "none" / "m.onnx")


def test_too_large_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "FILE_LIMIT", 1000)
    with pytest.raises(ZooError, match="do not fit in one ONNX file"):
        exported("resnet18", tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
