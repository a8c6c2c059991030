"""A model that is cut into stage modules computes the same bits: outputs, gradients and buffers."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.pipeline.stage_modules import stage_modules

WIDTH = 8


class WithoutGradients(nn.Module):
    """Updates a buffer and computes a scale under no_grad, from a constant and from nested regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.layer.weight.abs().mean() + torch.tensor(1.5)
            self.mean.mul_(0.9).add_(x.mean(0))
            with torch.enable_grad():
                y = self.layer(scale * x.abs())
        return x + torch.tanh(self.layer(x)) / scale + self.mean + y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(self.layer(self.norm(x)).transpose(0, 1), 0.2).transpose(0, 1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.layer, x.to(torch.float64).float(), use_reentrant=False)


class Reentrant(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.layer, x * self.layer.bias, use_reentrant=True)


class Nested(nn.Module):
    """A U-shaped network: outputs of the first half are read by the second half, in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.layers[3:]:
            x = layer(x) * skips.pop()
        return x


class Changing(nn.Module):
    """Changes its input in place, and reads it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0).relu_() + self.layer(x)


class ChangingParts(Changing):
    """Changes parts of its input in place, and the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, :2] += self.layer.bias[:2]
        x.view(-1)[::3] = 0.5
        return self.layer(x.copy_(x.flip(0) * self.layer.bias.sum()))


class ChangingViewed(Changing):
    """Changes its input in place between the making and the reading of a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x[:, : WIDTH // 2]
        x.mul_(2.0)
        return self.layer(x) + half.sum(1, keepdim=True)


class TwoNames(nn.Module):
    """A layer with two names, and a buffer that ``+=`` changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first = self.layers[0]
        self.register_buffer("sum", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum += x.detach().sum(0)
        return torch.tanh(self.layers[1](self.first(x)))


def model(kind: type[nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
    torch.manual_seed(0)
    if kind is Nested:
        return Nested(), ("layers.1", "layers.3", "layers.5")
    if issubclass(kind, Changing):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH), kind()), ("1", "3")
    return nn.Sequential(*(kind() for _ in range(4))), ("1", "3")


@pytest.mark.parametrize(
    "kind",
    [
        *(WithoutGradients, Normed, Checkpointed, Reentrant, Nested),
        *(Changing, ChangingParts, ChangingViewed, TwoNames),
    ],
)
def test_stages_compute_the_models_bits(kind: type[nn.Module]) -> None:
    """They leave their inputs as they are: autograd does not allow changes of what a stage receives."""
    whole, cuts = model(kind)
    other = copy.deepcopy(whole)
    x = torch.randn(4, WIDTH)
    stages = stage_modules(other, (x,), {}, cuts)
    torch.manual_seed(1)
    wanted = whole(x)
    wanted.square().sum().backward()
    torch.manual_seed(1)
    found = (x,)
    for stage in stages:
        given, versions = found, [t._version for t in found]
        found = stage.module(*given)
        found = found if isinstance(found, tuple) else (found,)
        assert [t._version for t in given] == versions
    found[0].square().sum().backward()
    assert torch.equal(found[0], wanted)
    for (name, one), two in zip(whole.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.equal(one.grad, two.grad), name
    for (name, one), two in zip(whole.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two), name


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + self.layer(x)


def test_a_region_that_runs_as_a_whole_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"Sequential cannot be cut into stages: .* region of wrap_with_autocast"
    ):
        stage_modules(model(Mixed)[0], (torch.zeros(4, WIDTH),), {}, ("1",))


def test_a_stage_keeps_the_mode_in_which_the_model_was_planned() -> None:
    """The ops of batch norm and dropout differ by mode, and a stage has those of one."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), torch.randn(4, WIDTH)
    for training, have in ((True, "training"), (False, "evaluation")):
        stages = stage_modules(model.train(training), (x,), {}, ("1",))
        for stage in stages:
            assert all(part.training == training for part in stage.module.modules())
            assert stage.module.train(training) is stage.module
            with pytest.raises(UsageError, match=f"planned, {have}; for the other one, call"):
                nn.Sequential(stage.module).train(not training)
    expected = model(x)
    assert torch.equal(stages[1].module(stages[0].module(x)), expected)


class ChangingHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(WIDTH, WIDTH), Doubling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x + self.change(x[:, : WIDTH // 2]).sum(1, keepdim=True)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class Counting(nn.Module):
    """Counts its calls in one element of a buffer."""

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("counts", counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[0] += 1.0
        return x * self.counts.clone()[0]


def test_memory_that_two_stages_would_share_and_one_changes_is_refused() -> None:
    """Each stage would have its own copy, so that one would read what the other has not changed."""
    with pytest.raises(
        ModelError, match=r"stage 1 changes a tensor of an earlier stage in place by aten.mul_"
    ):
        stage_modules(ChangingHalf(), (torch.zeros(4, WIDTH),), {}, ("change",))
    counts = torch.zeros(2)
    counting = nn.Sequential(Counting(counts), Counting(counts))
    with pytest.raises(ModelError, match=r"stages 0 and 1 share the buffer 0.counts, 1.counts"):
        stage_modules(counting, (torch.zeros(4, WIDTH),), {}, ("1",))


class Named(nn.Module):
    """Its arguments are called like builtins."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, input: torch.Tensor, type: object = "relu") -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) if type else x) + input


def test_the_first_stage_takes_the_models_arguments_by_name() -> None:
    x, more = torch.randn(4, WIDTH), torch.ones(4, WIDTH)
    model = Named()
    one, two = stage_modules(model, (x,), {"input": more, "type": "relu"}, ("second",))
    assert torch.equal(two.module(*one.module(x, input=more, type="relu")), model(x, input=more))
    with pytest.raises(ModelError, match="planned for type = 'relu', not 'tanh'"):
        one.module(x, input=more, type="tanh")
    for wrong in ((8, 8), [more]):
        with pytest.raises(ModelError, match=f"Named has an argument that is a {type(wrong).__name__}; pass"):
            stage_modules(model, (x,), {"input": more, "type": wrong}, ("second",))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Calling(nn.Module):
    """Applies a function to what its layer computes."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def halved(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient / 2)
    return x


def rounded_if_saved(x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(torch.round, torch.clone):
        return x.tanh()


class Counted(nn.Module):
    """Counts its calls in an attribute. ``reads``: it computes with the number, too."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.reads = nn.Linear(WIDTH, WIDTH), 0, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls if self.reads else self.layer(x)


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.layer(x) - self.mean


def test_a_counter_that_the_forward_does_not_read_is_left_as_it_was() -> None:
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counted(False))
    assert len(stage_modules(whole, (torch.zeros(4, WIDTH),), {}, ("1",))) == 2
    assert whole[1].calls == 0


def hooked() -> nn.Module:
    module = Calling(torch.tanh)
    module.layer.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Calling(Rounded.apply), "calls the autograd function Rounded, whose backward stages would not run"),
        (Calling(halved), "calls Tensor.register_hook, and stages would not run that hook"),
        (hooked(), "1.layer has a backward hook, which stages would not run"),
        (Calling(rounded_if_saved), "its forward uses torch.autograd.graph.saved_tensors_hooks"),
        (Calling(lambda y: y * random.random()), "its forward draws from Python's random"),
        (Assigning(), "its forward assigns the buffer mean, and stages would not; change it in place"),
        (Counted(True), "its forward computes with calls, which it changes; make it a buffer"),
        (
            Calling(lambda y: (y, y)),
            "returns a tuple with the same tensor twice; a pipeline needs a tensor or a",
        ),
        (Calling(lambda y: (y, None)), "returns a tuple with numbers or None"),
        (Calling(lambda y: (y, (y.exp(), y.sin()))), "returns a nested tuple"),
        (Calling(lambda y: {"y": y}), "returns a dict"),
    ],
)
def test_models_whose_stages_would_compute_something_else_are_refused(
    module: nn.Module, message: str
) -> None:
    """An exported graph has neither the backward of an autograd function nor hooks, and the last stage returns plain
    tensors to the loss."""
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), module)
    with pytest.raises(ModelError, match=f"Sequential .*{message}"):
        stage_modules(whole, (torch.zeros(4, WIDTH),), {}, ("1",))


def test_a_part_with_a_name_of_graph_modules_is_refused() -> None:
    whole = nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, WIDTH), code=nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(
        ModelError, match="has an attribute called code, as PyTorch's graph modules have; rename it"
    ):
        stage_modules(whole, (torch.zeros(4, WIDTH),), {}, ("code",))
