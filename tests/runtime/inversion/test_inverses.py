"""Laws of inversion: sound, exact in float64; refused where it must be; an ordinary residual block is not taken for
invertible."""

from __future__ import annotations

import copy

import pytest
import torch
from planned_steps import PlannedStep, bound, run_once, verify
from reversed_steps import Functions, MeanSquare, activations, gradient_error, pairs, priced, reversed_step
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.ir import ModelError
from rematplan.ir.recoverable import recoveries
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.schedule import runs_of
from rematplan.planner.strategies.reversible import Reversible
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find_inverses import with_exact_inverses, with_inverses


class Residual(nn.Module):
    """Ordinary residual blocks, with and without normalisation, one of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.narrow = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = self.second(self.norm(x)) + x
        x = x - torch.cat([self.narrow(x), self.narrow(x).sin()], -1)
        return (x + self.third(x)).square().mean()


def test_an_ordinary_residual_block_is_not_taken_for_invertible() -> None:
    model, x = Residual(), torch.randn(16, 8)
    step, graph, plan = reversed_step(model, x)
    assert step.inverses == ()
    assert plan.estimate == no_recompute(graph).estimate
    # a gradient of the input makes the block's input no more invertible
    assert reversed_step(model, x.requires_grad_())[0].inverses == ()


class Activations(nn.Module):
    """Convolution, batch norm, an invertible activation, again and again: the outputs give the inputs back."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        kinds = [nn.LeakyReLU(0.3), nn.ELU(), nn.PReLU(6), nn.LeakyReLU(0.01)]
        norms = [
            nn.BatchNorm2d(6),
            nn.GroupNorm(3, 6),
            nn.BatchNorm2d(6, affine=False),
            nn.InstanceNorm2d(6, affine=True),
        ]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), n, k) for n, k in zip(norms, kinds, strict=True))
        )
        self.train(training)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(functional.pad(torch.cat([x, x], 1), (1, 1, 0, 2)))
        return functional.pixel_shuffle(x.roll(1, -1)[:, :4].flip(2).exp(), 2).neg().div(3.0).square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_normalisations_and_activations_come_back(training: bool) -> None:
    torch.manual_seed(1)
    model, x = Activations(training).double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for parameter in model.parameters():  # scales other than one, biases other than zero
        parameter.data.add_(0.3)
    step, graph, plan = reversed_step(model, x)
    kernels = {fill.kernel for call in step.inverses for fill in call.target.fills}
    assert {"batch_norm", "group_norm", "leaky_relu", "elu", "prelu"} <= kernels
    assert plan.estimate.peak < no_recompute(graph).estimate.peak
    assert gradient_error(model, step, plan, x) < 1e-10


class Plain(nn.Module):
    """Each of the table's other rows, one behind the other, with something in between that keeps its input."""

    def forward(self, x: Tensor) -> Tensor:
        for change in (
            lambda y: 3.0 - y,
            lambda y: torch.sub(1.0, y, alpha=2.0),
            lambda y: (y / 4).exp(),
            lambda y: (y + 5.0).log(),
            lambda y: -y,
            lambda y: y.add(0.5, alpha=3.0),
            lambda y: y * torch.tensor([0.5, 2.0, 1.5], dtype=y.dtype),
            lambda y: y.float().double() * 1.0 + y,
            lambda y: y.t().contiguous().t(),
            lambda y: torch.stack([y, y * 2], 0).sum(0),
            lambda y: functional.pad(y, (0, 0, 2, 1)),
            lambda y: y.roll((1, 1), (0, 1)).flip(0),
        ):
            x = change(x.sin() * self.weight)
        return x.sin().mean()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.8, 1.1]))


class Streams(nn.Module):
    """A stem and four functions, for couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 16)
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
        )


class Scales(Streams):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, -1)
        gamma = torch.linspace(0.8, 1.2, a.shape[-1], dtype=x.dtype)
        for f, g in pairs(list(self.functions)):
            a = functional.leaky_relu(gamma * a + f(b), 0.4)
            b = g(a) - b * 0.9
        return torch.cat([a, b], -1)


class Differences(Streams):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for f, g in pairs(list(self.functions)):
            a, b = x[..., :8], x[..., 8:]
            a = f(b) - a
            x = torch.cat((a, torch.sub(b, g(a), alpha=0.5)), -1)
        return x


def test_every_inverse_gives_back_what_it_inverts() -> None:
    """Each inverse found, alone: run on the true values, it gives the true value in the true layout."""
    torch.manual_seed(0)
    cases = [(Plain(), (torch.rand(4, 3),)), (Activations(True), (torch.randn(4, 3, 8, 8),))]
    cases += [(MeanSquare(kind()), (torch.randn(6, 5),)) for kind in (Scales, Differences)]
    ran = set()
    for model, x in cases:
        model, x = model.double(), tuple(t.double() for t in x)
        for step in (
            with_inverses(capture(model, x, "step"), named_tensors(model)).step,
            with_exact_inverses(capture(model, x, "step")),
        ):
            values = _values(model, step, x)
            for call in step.inverses:
                inverse = call.target
                found = inverse(*(values[a.value] for a in call.args))
                true = values[call.results[0]]
                assert (found.shape, found.stride(), found.dtype) == (true.shape, true.stride(), true.dtype)
                if inverse.exact:
                    assert torch.equal(found, true)
                else:
                    assert torch.allclose(found, true, rtol=1e-10, atol=1e-11), call.name
                ran |= {fill.kernel for fill in inverse.fills}
    assert {"subtract", "difference", "add", "divide", "copy", "batch_norm", "leaky_relu"} <= ran


def _values(model: nn.Module, step: CapturedStep, x: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Every forward value of the step, by running it call by call."""
    from rematplan.runtime.graph.captured_step import substitute

    values = bound(step, model, x)
    torch.manual_seed(0)
    with torch.no_grad():
        for call in step.calls:
            found = call.target(
                *substitute(call.args, values.__getitem__), **substitute(call.kwargs, values.__getitem__)
            )
            for name, tensor in zip(call.results, (found,) if call.single else found, strict=True):
                if name:
                    values[name] = tensor
    return values


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        (
            torch.tensor([1.0, 0.0] * 4),
            "its scale comes as close to zero as 0; the smallest that is inverted is 0.001",
        ),
        (torch.full((8,), 1e-5), "its scale comes as close to zero as 1e-05"),
        (torch.full((8,), float("nan")), "its scale comes as close to zero as nan"),
    ],
)
def test_scales_near_zero_are_refused_with_a_line(scale: Tensor, line: str) -> None:
    class Scaled(Streams):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.stem(x).chunk(2, -1)
            for f, g in pairs(list(self.functions)):
                a = self.gamma * a + f(b)
                b = self.gamma * b + g(a)
            return torch.cat([a, b], -1).square().mean()

    model, x = Scaled(), torch.randn(64, 5)
    model.gamma = nn.Parameter(scale)
    found = with_inverses(capture(model, (x,), "step"), named_tensors(model))
    assert any(line in refused for refused in found.refused)
    divided = [f for c in found.step.inverses for f in c.target.fills if f.kernel == "divide"]
    assert divided == []

    model.gamma = nn.Parameter(torch.full((8,), 0.7))
    step, _, plan = reversed_step(model, x)
    planned = PlannedStep(model, step, plan.schedule)
    run_once(planned, (x,))
    with torch.no_grad():
        model.gamma[3] = 1e-6  # training may bring it there after the plan was made
    with pytest.raises(ModelError, match="a scale by which the plan divides has come near zero"):
        run_once(planned, (x,))


def test_halves_of_odd_numbers_are_refused_with_a_line() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.f = nn.Linear(5, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.stem(x).split((2, 1), -1)
            return (b + self.f(a)).square().mean()

    found = with_inverses(capture(Odd(), (torch.randn(4, 5),), "odd"), named_tensors(Odd()))
    assert found.step.inverses == ()
    assert any(
        "its shape [4, 1] is broadcast to [4, 2], which cannot be undone" in line for line in found.refused
    )


def test_copies_of_parts_that_serve_nothing_are_not_made() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (torch.softmax(q @ k.mT, -1) @ v).square().mean()

    model, x = Attention(), torch.randn(2, 5, 8)
    step = capture(model, (x,), "attention")
    assert with_inverses(step, named_tensors(model)).step.calls == step.calls


class Replayed(nn.Module):
    """Dropout and batch norm inside F."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.functions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return chunked_channels(list(self.functions), self.stem(x)).square().mean()


def chunked_channels(functions: Functions, x: Tensor) -> Tensor:
    for f, g in pairs(functions):
        a, b = x.chunk(2, 1)
        a = a + f(b)
        x = torch.cat([b + g(a), a], 1)
    return x


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_is_replayed_and_batch_norm_updates_once(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Replayed().double().to(memory_format=layout)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64).to(memory_format=layout)
    step, graph, plan = reversed_step(model, x)
    seeded = [c.name for c in step.calls if c.seeded]
    assert any(runs_of(plan.schedule).count(name) == 2 for name in seeded)
    assert len(recoveries(graph)) >= 6
    assert 0 < gradient_error(model, step, plan, x) < 1e-10


def test_exact_inverses_keep_every_bit() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8 + 4 * i, 4) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.cat([x, torch.sigmoid(layer(x))], -1)
            return x.square().mean()

    model, x = Skips(), torch.randn(16, 8)
    step = with_exact_inverses(capture(model, (x,), "skips"))
    graph = priced(step)
    plan = Reversible().curve(graph, ())[-1]
    assert any(inverse.name in runs_of(plan.schedule) for inverse in graph.inverses)
    assert worst_error(graph, plan.schedule) == 0
    assert verify(PlannedStep(model, step, plan.schedule), (x,)).bit_equal


@pytest.mark.parametrize(
    ("narrow", "wide", "exact"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.bfloat16, torch.float16, False),  # more digits, but 1e5 becomes infinite
        (torch.float16, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, False),
    ],
)
def test_a_cast_is_undone_only_if_every_number_survives_it(
    narrow: torch.dtype, wide: torch.dtype, exact: bool
) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=narrow))

        def forward(self, x: Tensor) -> Tensor:
            saved = x * self.weight
            cast = saved.to(wide)
            return saved.log().float().sum() + cast.cos().float().sum()

    step = with_exact_inverses(capture(Casts(), (torch.rand(4, 8).to(narrow),), "casts"))
    undone = [inverse for inverse in step.inverses if "copy" in str(inverse.target)]
    assert bool(undone) == exact


def test_a_planned_module_inverts_in_any_loop() -> None:
    class Scores(Replayed):
        def forward(self, x: Tensor) -> Tensor:
            return chunked_channels(list(self.functions), self.stem(x)).mean((2, 3))

    torch.manual_seed(0)
    model, x = Scores().double(), torch.randn(16, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    options: dict[str, object] = {"strategy": "reversible", "costs": "roofline"}
    planned = rematplan.plan_module(model, (x,), budget="min", **options)
    full = no_recompute(priced(capture(MeanSquare(plain), (x,), "plain"))).estimate.peak
    assert planned.plan.estimate.peak < 0.6 * full
    for _ in range(2):
        for one in (planned, plain):
            torch.manual_seed(3)
            one(x).square().sum().backward()
    assert all(map(torch.equal, planned.buffers(), plain.buffers()))
    error, size = (
        torch.cat([t.flatten() for t in ts]).norm()
        for ts in (
            [p.grad - q.grad for p, q in zip(planned.parameters(), plain.parameters(), strict=True)],
            [q.grad for q in plain.parameters()],
        )
    )
    assert 0 < error < 1e-10 * size


class Mixed(nn.Module):
    """Streams of one type, functions computed in a coarser one."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.functions = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(16)).to(low)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for f, g in pairs(list(self.functions)):
            a = a + f(b.to(self.low))
            b = b + g(a.to(self.low)).to(x.dtype)
        return torch.cat([a, b], -1).square().mean()


@pytest.mark.parametrize(
    ("stream", "low", "most"), [(torch.float32, torch.bfloat16, 2e-2), (torch.float64, torch.float32, 1e-6)]
)
def test_finer_streams_under_a_coarser_compute(stream: torch.dtype, low: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    model, x = Mixed(low), torch.randn(64, 16, dtype=stream)
    step, graph, plan = reversed_step(model, x)
    assert activations(plan, graph) < 0.5 * activations(no_recompute(graph), graph)
    assert 0 < worst_error(graph, plan.schedule) < most  # the compute's grain, at any depth
    assert gradient_error(model, step, plan, x) < most
