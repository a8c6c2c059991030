"""Laws of outputs that a model's own loss is made of: no gradient of theirs is planned for, and one that comes all the
same is right to the bit."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import rematplan
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.problem.loss_boundary import reserved_for_loss

pytestmark = pytest.mark.usefixtures("one_capture")
CPU = torch.device("cpu")
CAME = "a gradient arrived for output"
Pair = tuple[nn.Module, nn.Module]


class Classifier(nn.Module):
    """Gives its loss and its logits; a second head, off the loss's path, has dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            m for _ in "ab" for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2))
        ]
        self.trunk, self.head = nn.Sequential(*layers), nn.Linear(32, 10)
        self.second = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        logits = self.head(h)
        return functional.cross_entropy(logits, torch.arange(len(x)) % 10), logits, self.second(h)


class Autoencoder(nn.Module):
    """A variational one: gives the divergence, the reconstruction, their loss and what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        kl = (mean.square() + log_variance.exp() - log_variance).mean()
        return {"kl": kl, "reconstruction": self.decode(z), "z": z}


class Auxiliary(nn.Module):
    """Logits, for a loss outside, and an auxiliary loss made of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        balance = h.square().mean()
        return self.head(h), balance, balance + h.mean()


class Detached(nn.Module):
    """A scalar is made of the logits, but gives their layer no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        logits = self.head(h)
        return h.mean() + logits.detach().mean(), logits


class Views(nn.Module):
    """Gives views of what its loss is made of, as a cache of keys and values is."""

    def __init__(self) -> None:
        super().__init__()
        self.pack, self.out = nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.pack(x).chunk(3, -1)
        y = self.out(q.sigmoid() * k.tanh() + v)
        return y.square().mean(), k, v, y.unflatten(1, (2, 5)).transpose(1, 2)


def pair(model: nn.Module, *args: Any, budget: str | int = "100%", **options: Any) -> Pair:
    plain = copy.deepcopy(model)
    settings = {"strategy": "approx_dp", "costs": "roofline", **options}
    return rematplan.plan_module(model, args or (x_(),), budget=budget, **settings), plain


def x_(seed: int = 1) -> Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def left(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """All that a use leaves."""
    state = [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    return [
        torch.zeros(()) if t is None else t.clone() for t in ([*state, x.grad] if x is not None else state)
    ]


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of gradients that came."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if CAME in str(w.message)]


def left_out(planned: nn.Module) -> frozenset[str]:
    return planned._rematplan.last.unplanned.captured.left_out


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        (Classifier, {"1"}),
        (Autoencoder, set()),
        (Auxiliary, set()),
        (Detached, set()),
        (Views, {"1", "2", "3"}),
    ],
)
def test_only_what_a_scalar_is_made_of_has_no_tangent(kind: type[nn.Module], without: set[str]) -> None:
    torch.manual_seed(0)
    planned, _ = pair(kind())
    assert left_out(planned) == without
    tangents = {i.target for i in planned._rematplan.last.compiled.step.inputs if i.kind == "tangent"}
    assert tangents.isdisjoint(without)
    assert tangents | without == {str(at) for at in range(len(tangents | without))}


LOOPS: dict[str, Callable[[Any], None]] = {
    "the loss": lambda out: out[0].backward(),
    "the loss and the second head": lambda out: (out[0] + out[2].square().mean()).backward(),
    "logits alone": lambda out: out[1].square().mean().backward(),
    "both at once": lambda out: (out[0] + out[1].square().mean()).backward(),
    "all at once": lambda out: sum(o.square().mean() for o in out).backward(),
    "the loss, then logits": lambda out: (
        out[0].backward(retain_graph=True),
        out[1].square().mean().backward(),
    ),
    "logits, then the loss": lambda out: (
        out[1].square().mean().backward(retain_graph=True),
        out[0].backward(),
    ),
    "logits twice": lambda out: (
        out[1].square().mean().backward(retain_graph=True),
        (3 * out[1]).exp().mean().backward(),
    ),
    "the second head, then logits": lambda out: (
        out[2].square().mean().backward(retain_graph=True),
        out[1].square().mean().backward(),
    ),
}


@pytest.mark.parametrize(("loop", "budget"), zip(LOOPS, itertools.cycle(("100%", "min")), strict=False))
def test_every_backward_is_right_at_once_and_later(loop: str, budget: str) -> None:
    torch.manual_seed(0)
    planned, plain = pair(Classifier(), budget=budget)
    comes = "logits" in loop or "at once" in loop
    with said() as messages:
        for step in range(3):
            results = []
            for model in (planned, plain):
                torch.manual_seed(step)
                x = x_(step)
                LOOPS[loop](model(x))
                results.append(left(model, x))
                if step:  # the second step adds to the gradients of the first
                    model.zero_grad()
            assert all(map(torch.equal, *results)), step
    assert len(messages) == comes
    assert left_out(planned) == (set() if comes else {"1"})


def test_steps_that_were_begun_before_a_gradient_came_are_right_too() -> None:
    """Accumulation: several forwards, then their backwards."""
    torch.manual_seed(0)
    planned, plain = pair(Classifier())
    results = []
    with said() as messages:
        for model in (planned, plain):
            torch.manual_seed(1)
            outputs = [model(x_(seed)) for seed in range(3)]
            for loss, logits, _ in reversed(outputs):
                (loss + logits.square().mean()).backward()
            results.append(left(model))
    assert all(map(torch.equal, *results))
    assert len(messages) == 1
    assert len(planned.plans) == 1


def test_a_later_plan_expects_the_gradient_that_arrived() -> None:
    torch.manual_seed(0)
    planned, plain = pair(Classifier())
    with said() as messages:
        for size in (40, 20):
            results = []
            for model in (planned, plain):
                torch.manual_seed(1)
                x = x_()[:size].detach()
                model(x)[1].square().mean().backward()
                results.append(left(model))
            assert all(map(torch.equal, *results))
    assert len(messages) == 1
    copied = copy.deepcopy(planned)
    copied(x_())
    assert not left_out(copied)


def test_a_forward_whose_weights_changed_is_not_run_again() -> None:
    planned, _ = pair(Classifier())
    logits = planned(x_())[1]
    with torch.no_grad():
        planned.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        logits.square().mean().backward()


def test_a_graph_that_was_freed_is_not_run_again() -> None:
    planned, _ = pair(Classifier())
    loss, logits, _ = planned(x_())
    loss.backward()
    with pytest.raises(RuntimeError, match="backward a second time"):
        logits.square().mean().backward()


def test_second_derivatives_are_refused_as_ever() -> None:
    planned, _ = pair(Classifier())
    x = x_()
    logits = planned(x)[1]
    with said():
        (first,) = torch.autograd.grad(logits.square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.square().sum().backward()


def test_room_is_left_for_a_loss_on_outputs_whose_gradients_came() -> None:
    """And the whole step is within its peak then."""
    torch.manual_seed(0)
    planned, _ = pair(Classifier(), budget=2**20, strategy="store_all", costs="profile")
    x = x_().detach()

    def loop() -> None:
        planned.zero_grad(set_to_none=True)
        loss, logits, _ = planned(x)
        (loss + logits.square().mean()).backward()

    def aside() -> int:
        runner = planned._rematplan
        return reserved_for_loss(runner.planner.problem(runner.last.compiled.step))

    before = aside()
    with said():
        loop()
    loop()
    assert aside() > before
    resident = x.nbytes + sum(t.nbytes for t in (*planned.parameters(), *planned.buffers()))
    assert resident + peak_above_entry(loop, CPU)[0] <= planned.plan.peak


def test_weights_that_a_forward_computes_have_no_tangent_and_may_be_penalised_all_the_same() -> None:
    """Pruned ones, which are attributes of their layers."""
    results = []
    for use in (lambda m: m.requires_grad_(), lambda m: rematplan.apply(m, "100%", costs="roofline")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        for layer in (model[0], model[2]):
            prune.l1_unstructured(layer, "weight", 0.5)
        use(model)
        found = []
        with said() as messages:
            for penalty in (False, True, True):
                model.zero_grad()
                loss = model(x_()).square().mean()
                (loss + model[0].weight.abs().sum() if penalty else loss).backward()
                found += left(model)
                runner = getattr(model, "_rematplan", None)
                expected = {"1", "2"} if not penalty else {"2"}
                assert runner is None or runner.runners[0].last.unplanned.captured.left_out == expected
        results.append(found)
    assert all(map(torch.equal, *results))
    assert len(messages) == 1


def language_model(
    vocabulary: int, layers: int, width: int, tokens: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2, and what it is called with: words, which are its labels too."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, in each process of the tests

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_embd=width, n_head=2, n_positions=tokens, use_cache=False
    )
    words = torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(1))
    return GPT2LMHeadModel(config), {"input_ids": words, "labels": words}


def whole_peak(model: nn.Module, given: dict[str, Tensor]) -> int:
    """Of a step in whose loop the outputs stay to its end."""
    resident = given["labels"].nbytes + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    def loop() -> None:
        torch.manual_seed(3)
        outputs = model(**given)
        outputs.loss.backward()

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        peak = resident + peak_above_entry(loop, CPU)[0]
    return peak


def test_a_language_model_with_labels_is_charged_what_it_holds() -> None:
    model, given = language_model(50257, layers=2, width=32, tokens=32)
    plain = copy.deepcopy(model)
    planned = rematplan.plan_module(model, (), given, budget="100%", strategy="approx_dp")
    ours, eager = whole_peak(planned, given), whole_peak(plain, given)
    for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert ours <= planned.plan.budget < eager


def test_a_language_model_with_labels_is_planned_within_what_checkpoints_need() -> None:
    """And within nine tenths of its own peak."""
    model, given = language_model(2000, layers=4, width=64, tokens=64)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable()
    for budget in (whole_peak(checkpointed.train(), given), "90%"):
        planned = rematplan.plan_module(
            copy.deepcopy(model), (), given, budget=budget, strategy=rematplan.Auto(time_limit=0.1)
        )
        assert whole_peak(planned, given) <= planned.plan.budget
        assert left_out(planned) == {"1"}
