"""Laws of which modules of a model are planned in parts, and of what is said about others."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from parts_models import (
    WIDTH,
    Base,
    Block,
    Dropping,
    Matching,
    batch,
    in_parts,
    made,
    planned,
    run,
    same_steps,
    seeded,
)
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError, NotCaptured, UsageError
from rematplan.runtime.costs.measure import peak_above_entry

pytestmark = pytest.mark.usefixtures("few_searches")


class Settings(Dropping):
    """Layers that are equal but for a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].slope = 0.5


class Skips(Base):
    """An input that a block uses twice, and that is used after it, too: the order of the gradients' sum counts."""

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        kept = torch.tanh(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](kept)) + kept


class Headless(Base):
    """The last block's output is the result."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        np.random.uniform()
        return self.body(x)


class Features(Skips):
    """Features that a loss outside reads; how the forward hands them over."""

    how = "results"

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        np.random.uniform()
        first = torch.tanh(self.blocks[0](x))
        found = self.head(self.blocks[2](self.blocks[1](first)))
        if self.how == "an attribute":
            self.features = [first]
        return (found, first) if self.how == "results" else found

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        found = self(x, labels)
        logits, first = found if self.how == "results" else (found, None)
        first = self.features.pop() if first is None else first
        return functional.cross_entropy(logits, labels) + first.square().mean()


class Slices(Base):
    """A block that returns every other row."""

    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat((x, x), dim=1).view(-1, WIDTH))[::2]

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Half()

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        return super().body(x)


class Result:
    """An object that pytrees do not open."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Objects(Matching):
    """Returns its loss in an object."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return Result(super().forward(x, labels))


class Tied(nn.Module):
    """A block that uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(torch.sin(x))))


class TiedElsewhere(Base):
    """A weight that a block uses twice, and that is used after it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Tied()

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        kept = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](kept) @ self.blocks[1].linear.weight


class TiedTwice(TiedElsewhere):
    """A block that uses a weight twice, and is called twice."""

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        return self.blocks[1](self.blocks[2](self.blocks[1](self.blocks[0](x))))


def test_a_refusal_says_why_there_are_no_parts() -> None:
    with pytest.raises(NotCaptured, match=r"nor in parts: statistics cannot be combined"):
        rematplan.plan_module(Matching(), batch(0), budget="1MiB", statistics=rematplan.Kronecker())
    with pytest.raises(NotCaptured, match=r"nor in parts: a saved plan cannot be combined"):
        rematplan.plan_module(Matching(), batch(0), strategy=rematplan.SavedPlan("plan.json"))


class WithoutParts(Matching):
    """A model of which nothing can be planned."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.head = nn.Sequential(nn.Linear(WIDTH, 5))


def test_a_model_without_parts_runs_in_eager_mode_if_its_step_fits_the_budget() -> None:
    model, plain = made(WithoutParts)
    in_parts(model, "1MiB")
    why = r"reads values of tensors .*; no part of it can be planned \(head: it is too small\)"
    with pytest.warns(UserWarning, match=f"{why}: it runs in eager mode"):
        same_steps(model, plain, 3)
    model.zero_grad()
    given, promised = batch(0), planned(model).peak
    peak, _ = peak_above_entry(lambda: run(model, *given), torch.device("cpu"))
    peak += sum(t.nbytes for t in (*model.parameters(), *given))
    assert 0.8 * promised < peak <= promised < 2**20
    with pytest.raises(InfeasibleBudget, match=f"eager mode: budget .*{why}") as error:
        run(in_parts(WithoutParts(), promised - 1), *batch(0))
    assert error.value.smallest == promised
    with pytest.raises(InfeasibleBudget, match=f"eager mode: budget .*{why}"):
        run(in_parts(WithoutParts(), "90%"), *batch(0))


class Wide(Matching):
    """A model whose blocks keep little beside what the rest saves."""

    times = 600

    def body(self, x: Tensor) -> Tensor:
        return torch.cat([super().body(x), x.repeat(1, self.times).requires_grad_().cosh()], 1)[:, :WIDTH]


def test_parts_that_keep_little_are_left_to_eager_mode() -> None:
    model, plain = made(Wide)
    in_parts(model, "1GiB")
    why = r"no part of it can be planned \(blocks\.0: what can be planned keeps less than 1/32 of what the step holds\)"
    with pytest.warns(UserWarning, match=why):
        same_steps(model, plain, 2)
    assert not planned(model).parts
    model.times = plain.times = 6
    in_parts(model, "1GiB")
    same_steps(model, plain, 2)
    assert len(planned(model).rehearsed.calls) == 3


class Undropped(Matching):
    """Draws for layers that are left out, but with a probability of 0, inside of a part."""

    class Body(Base):
        dropped = 0.0

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if not torch.rand([]) < self.dropped:
                    x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Body()

    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def test_a_part_may_decide_by_draws_whose_outcome_is_known() -> None:
    model, plain = made(Undropped)
    in_parts(model, "1MiB")
    same_steps(model, plain, 3)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"inner"}


def test_equal_layers_are_captured_once_and_told_of_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    model, plain = made(Matching)
    in_parts(model, "85%")
    for at in range(4):  # gradients are summed over several backwards
        for one in (model, plain):
            seeded(at)
            run(one, *batch(at))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    first, later = planned(model).parts  # the first one's input needs no gradient
    assert first.names == ["blocks.0"]
    assert later.names == ["blocks.1", "blocks.2"]
    (line,) = capfd.readouterr().err.splitlines()
    assert "planned in parts: blocks.0, blocks.1 and 1 equal" in line
    assert "% of the activations; the rest is charged" in line


def test_layers_with_other_settings_have_other_plans() -> None:
    model, plain = made(Settings)
    in_parts(model, "90%")
    same_steps(model, plain, 6)
    assert ["blocks.1"] in [group.names for group in planned(model).parts]


@pytest.mark.parametrize("kind", [Skips, TiedElsewhere, TiedTwice])
def test_a_module_whose_input_or_weight_has_several_uses_is_no_part(kind: type[Base]) -> None:
    model, plain = made(kind)
    in_parts(model, "1MiB")
    same_steps(model, plain, 4)
    assert all("blocks.1" not in group.names for group in planned(model).parts)
    assert "; not planned: blocks.1 (it uses an input or a parameter several times" in planned(model).text()


def test_a_named_module_that_cannot_be_a_part_is_refused() -> None:
    model, _ = made(Skips)
    in_parts(model, "1MiB", modules="blocks.1")
    with pytest.raises(ModelError, match="uses an input or a parameter several times"):
        run(model, *batch(0))


def test_a_last_module_whose_result_a_loss_outside_reads_is_a_part() -> None:
    model, plain = made(Headless)
    in_parts(model, "1MiB")
    same_steps(model, plain, 2)
    assert sum(len(group.names) for group in planned(model).parts) == 3


def test_a_loss_in_an_object_is_found() -> None:
    model, plain = made(Objects)
    in_parts(model, "2MiB")
    for at in range(3):
        for one in (model, plain):
            seeded(at)
            one.zero_grad()
            one(*batch(at)).loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    found = planned(model).rehearsed
    kinds = "".join(event.kind for event in found.events)
    assert kinds == "FFFBBB"
    assert len({event.during for event in found.events if event.kind == "B"}) > 1  # measured


@pytest.mark.parametrize("how", ["results", "an attribute"])
def test_a_module_whose_input_a_loss_outside_reads_too_is_no_part(how: str) -> None:
    model, plain = made(Features)
    in_parts(model, "1MiB")
    for one in (model, plain):
        one.how = how
        for at in range(3):
            seeded(at)
            one.loss(*batch(at)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad), name
    assert {name for name, _ in planned(model).rehearsed.calls} >= {"blocks.0", "blocks.2"}
    assert "; not planned: blocks.1 (it uses an input or a parameter several times" in planned(model).text()


class Penalising(Base):
    """Differentiates the backward of its first blocks, and of all if ``whole``."""

    whole = False

    def __init__(self) -> None:
        super().__init__(blocks=0)
        for _ in range(3):  # of few ops: two derivatives more have many times as many
            self.blocks.append(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)))

    def body(self, x: Tensor) -> Tensor:
        np.random.uniform()
        x = x.clone().requires_grad_()
        made = super().body(x) if self.whole else self.blocks[1](self.blocks[0](x))
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        made = made + slope + again
        return made if self.whole else self.blocks[2](made)


def test_a_module_whose_backward_is_differentiated_is_no_part() -> None:
    model, plain = made(Penalising)
    in_parts(model, "8MiB")
    same_steps(model, plain, 2)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"blocks.2"}
    assert "; not planned: blocks.1 (its backward is differentiated again)" in planned(model).text()
    whole = Penalising()
    whole.whole = True
    with pytest.warns(UserWarning, match="no part of it can be planned"):
        run(in_parts(whole, "8MiB"), *batch(0))


class Kernel(torch.autograd.Function):
    """A copy by a function that takes addresses."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return y

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return 1 * gradient


class Copied(nn.Module):
    """A module that calls a kernel by its address."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Kernel.apply(x)
        return found


class Fused(Base):
    """Such modules before and after blocks; the first trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Copied(), Copied()

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.after(super().body(self.before(x))))


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_is_no_op_is_told_and_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = made(Fused)
    same_steps(in_parts(model, "95%"), plain, 3)
    (said,) = capsys.readouterr().err.splitlines()
    assert "not planned: after (it calls a kernel with the address of a tensor (data_ptr)" in said


def test_refusals() -> None:
    model, _ = made(Dropping)
    with pytest.raises(UsageError, match="no module 'layers"):
        in_parts(model, "80%", modules="layers.*")
    for options, name in (
        ({"statistics": rematplan.Kronecker()}, "statistics"),
        ({"strategy": rematplan.Auto(keep_order=True)}, "keep_order of auto"),
    ):
        with pytest.raises(UsageError, match=f"{name} cannot be combined"):
            in_parts(model, "80%", modules="blocks.*", **options)
    in_parts(model, "100KiB")
    with pytest.raises(InfeasibleBudget):
        run(model, *batch(0))
    alone, _ = made(Base)
    in_parts(alone, "90%", modules="blocks.0.drop")
    alone.blocks[0].drop.p = 0.0
    with pytest.raises((ModelError, InfeasibleBudget)):
        model(batch(0)[0], "text")


def test_a_module_that_returns_a_slice_is_no_part() -> None:
    model, plain = made(Slices)
    in_parts(model, "1MiB")
    same_steps(model, plain, 3)
    assert {name for name, _ in planned(model).rehearsed.calls} == {"blocks.0", "blocks.2"}
    assert "; not planned: blocks.1 (it returns a slice" in planned(model).text()
