"""Losses fit the outputs they are given, or say that they do not."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from rematplan.api import load_step
from rematplan.ir import ModelError, UsageError
from rematplan.runtime.capture.with_loss import LOSSES, with_loss


class Gives(nn.Module):
    """Gives an output of a shape, in a nest."""

    def __init__(self, shape: tuple[int, ...], nest: str = "tensor") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape))
        self.nest = nest
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> object:
        self.calls += 1
        y = self.w * x.mean()
        return {"tensor": y, "tuple": (x.long(), y), "dict": {"a": [x.long()], "b": y}, "none": x.long()}[
            self.nest
        ]


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((), "output"),
        ((4,), "mse"),
        ((4, 3), "cross_entropy"),
        ((2, 5, 3), "cross_entropy"),
        ((2, 3, 4, 4), "cross_entropy"),
        ((4, 1), "mse"),  # the cross entropy of one class is zero, and so are its gradients
        ((2, 1, 4, 4), "mse"),
    ],
)
def test_the_default_fits_the_shape(shape: tuple[int, ...], chosen: str) -> None:
    module, batch = with_loss(Gives(shape), (torch.randn(2),))
    assert module.loss.name == chosen
    loss = module(*batch)
    assert loss.shape == ()
    loss.backward()
    assert module.model.w.grad.abs().sum() > 0


def test_sequences_have_their_classes_last_and_images_second() -> None:
    for shape, target in (((2, 5, 3), (2, 5)), ((2, 3, 4, 4), (2, 4, 4))):
        _, batch = with_loss(Gives(shape), (torch.randn(2),), "cross_entropy")
        assert batch[1].shape == target
        assert batch[1].max() < 3


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("nest", ["tensor", "tuple", "dict"])
def test_every_loss_on_every_nest_leaves_the_model_untouched(name: str, nest: str) -> None:
    model = Gives((4, 3), nest)
    state = torch.get_rng_state()
    module, batch = with_loss(model, (torch.randn(2, generator=torch.Generator()),), name)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    assert module(*batch).shape == ()


class Trains(nn.Module):
    """Gives what no parameter is in, a parameter as it is, and at last what is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), self.w, self.w * 2


def test_the_loss_is_of_an_output_that_is_computed_from_a_parameter() -> None:
    module, batch = with_loss(Trains(), (torch.randn(2, 5),), "output")
    module(*batch).backward()
    assert torch.equal(module.model.w.grad, torch.full((4, 3), 2.0))


def test_a_file_with_two_heads_says_that_one_is_not_trained(tmp_path: Path) -> None:
    heads = [helper.make_node("MatMul", ["x", w], [y]) for w, y in (("u", "a"), ("v", "b"))]
    weights = [numpy_helper.from_array(np.ones((3, 2), np.float32), name) for name in "uv"]
    x, *outputs = (
        helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [4, 3]), ("a", None), ("b", None))
    )
    graph = helper.make_graph(heads, "g", [x], outputs, weights)
    path = tmp_path / "heads.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert any("1 of 2 parameters get no gradient" in note for note in load_step(path).notes)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="known: output, cross_entropy, mse"):
        with_loss(Gives((4,)), (torch.randn(2),), "hinge")
    with pytest.raises(UsageError, match="does not fit"):
        with_loss(Gives((4,)), (torch.randn(2),), "cross_entropy")
    with pytest.raises(ModelError, match="no floating-point output"):
        with_loss(Gives((4,), "none"), (torch.randn(2),))
    with pytest.raises(ModelError, match="does not run on inputs of shapes"):
        with_loss(nn.Linear(3, 2), (torch.randn(2, 5),))
