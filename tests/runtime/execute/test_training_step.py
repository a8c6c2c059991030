"""Laws of the planned step: bit-equal to plain autograd, once updated, within the simulated peak, on awkward
models."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_steps import PlannedStep, problem, verify, with_saves
from torch import Tensor, nn
from torch.nn import functional

from rematplan.ir import ModelError, ProblemError, TrainingGraph
from rematplan.module.verification import run_once, same_bits, untouched
from rematplan.planner.core.plan import Plan, plan_from_runs
from rematplan.planner.core.schedule import Run, with_frees
from rematplan.planner.overlap.place_on_lanes import on_two_lanes
from rematplan.planner.registry import STRATEGIES
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.profile import ProfileWarning, profile_costs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem.random_states import saves_state, state_of


class Conv(nn.Module):
    """Batch norm, dropout, in-place ReLU, pooling with indices, concatenation, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.group = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.a(x)), inplace=True)
        y = self.up(functional.max_pool2d(self.group(self.b(x)), 2))
        z = torch.cat([self.drop(x), y], 1).mean((2, 3))
        return functional.cross_entropy(self.head(z), target)


class Attention(nn.Module):
    """Tied embedding, fused attention, layer norm, GELU, views and splits, dropout replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        n, t, d = x.shape
        q, k, v = (p.view(n, t, 2, d // 2).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        x = x + self.mlp(self.norm(x))
        scores = x @ self.token.weight.T
        return functional.cross_entropy(scores.flatten(0, 1), tokens.roll(1, 1).flatten())


class SharedGradients(nn.Module):
    """Parameters whose gradients are one tensor, an expanded one, an untouched one, a frozen and an unused
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 6)) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.counter = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        return ((self.a + self.b) * self.frozen).sin().sum() + self.c.sum() + (x * self.a).sum()


class Recurrent(nn.Module):
    """A loop with shared weights, random numbers of several kinds, indexing and in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        outs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t] + 0.1 * torch.randn(h.shape, device=h.device), h)
            h = functional.dropout(h, 0.3)
            outs.append(h.clone())
        y = torch.stack(outs, 1)
        y[:, 0] = outs[1] * self.scale
        keep = torch.bernoulli(torch.full_like(y, 0.5))
        return (y * keep).masked_fill(y > 0.9, 0.0).pow(2).mean() + y.cumsum(1).std() + h.topk(2).values.sum()


class LargeScalar(nn.Module):
    """A mean square, which PyTorch's CPU kernel returns in a storage as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), x)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "conv": lambda: (Conv(), (torch.randn(3, 3, 10, 10), torch.tensor([1, 0, 4]))),
    "attention": lambda: (Attention(), (torch.randint(0, 11, (2, 7)),)),
    "shared_gradients": lambda: (SharedGradients(), (torch.randn(4, 6),)),
    "recurrent": lambda: (Recurrent(), (torch.randn(3, 3, 6),)),
    "large_scalar": lambda: (LargeScalar(), (torch.randn(64, 32),)),
    "bfloat16": lambda: (Attention().bfloat16(), (torch.randint(0, 11, (2, 7)),)),
}

Loaded = tuple[nn.Module, tuple[Tensor, ...], CapturedStep, TrainingGraph]


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NOT_HELD_BEFORE = ("rng_states", "library_workspaces", "tangent", "old_buffers")
"""What is charged as held all along, and is not there yet, or is no tensor."""


def held_before(graph: TrainingGraph) -> int:
    return sum(size for kind, size in graph.fixed_split.items() if kind not in NOT_HELD_BEFORE)


@pytest.fixture(scope="module", params=[f"{name}-{device}" for device in DEVICES for name in CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    name, _, device = request.param.partition("-")
    torch.manual_seed(0)
    module, batch = CASES[name]()
    module, batch = module.to(device), tuple(x.to(device) for x in batch)
    before = torch.are_deterministic_algorithms_enabled()
    if device != "cpu":  # attention adds up in any order unless it is refused to
        torch.use_deterministic_algorithms(True, warn_only=not isinstance(module, Attention))
    step = capture(module, batch, name)
    costs = profile_costs(step, cache=tmp_path_factory.mktemp("cache"))
    yield module, batch, step, problem(step, costs)
    torch.use_deterministic_algorithms(before)


def some_plans(graph: TrainingGraph, name: str) -> list[Plan]:
    """The ends and the middle of a strategy's curve."""
    quick = {"time_limit": 1.0} if "time_limit" in STRATEGIES[name].__dataclass_fields__ else {}
    base = graph.input_bytes + sum(t.bytes for t in graph.tensors)
    curve = STRATEGIES[name](**quick).curve(graph, [base, base // 2])
    return list({id(p): p for p in (curve[0], curve[len(curve) // 2], curve[-1])}.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_bit_equal_and_within_its_peak(case: Loaded, name: str) -> None:
    module, batch, step, graph = case
    held = held_before(graph)
    for plan in some_plans(graph, name):
        planned = PlannedStep(module, step, plan.schedule)
        outcome = verify(planned, batch, seed=7)
        assert outcome.bit_equal, outcome.differences
        with untouched(module):
            above, _ = peak_above_entry(lambda planned=planned: run_once(planned, batch), step.device)
        assert held + above <= plan.estimate.peak


def recompute_everything(graph: TrainingGraph) -> list[str]:
    """A run sequence in which every backward op is preceded by a whole second forward: as many re-runs as may
    be."""
    forward = [o.name for o in graph.ops if o.phase == "forward"]
    again = [name for name in forward if name not in graph.never_rerun]
    backward = [o.name for o in graph.ops if o.phase == "backward"]
    return forward + [name for b in backward for name in (*again, b)]


def test_recomputing_everything_before_every_backward_op_changes_no_bit(case: Loaded) -> None:
    module, batch, step, graph = case
    graph = replace(graph, never_rerun=())  # nor are small random ops kept
    plan = plan_from_runs(graph, recompute_everything(graph), "everything")
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


def test_two_lanes_change_no_bit_and_keep_their_peak(case: Loaded) -> None:
    module, batch, step, graph = case
    held = held_before(graph)
    everything = plan_from_runs(graph, recompute_everything(graph), "everything")
    for plan in (everything, *some_plans(graph, "approx_dp")):
        for more in (0, 2**40):
            laned = on_two_lanes(graph, plan, plan.estimate.peak + more)
            if laned is None:  # nothing comes back
                assert not plan.estimate.reruns
                continue
            planned = PlannedStep(module, step, laned.schedule, laned.lanes)
            for seed in range(2):
                assert verify(planned, batch, seed).bit_equal
            with untouched(module):
                above, _ = peak_above_entry(lambda planned=planned: run_once(planned, batch), step.device)
            assert held + above <= laned.lanes.peak
    assert "rematplan recovery" not in [t.name for t in threading.enumerate()]


def test_verify_finds_a_wrong_gradient_a_wrong_buffer_and_a_moved_generator() -> None:
    class Wrong(PlannedStep):
        def __call__(self, *batch: Tensor) -> Tensor:
            loss = super().__call__(*batch)
            self.module.norm.running_mean[0] += 1
            torch.rand(1)
            return loss + 1e-6 * self.module.a.weight.sum() - 1e-6 * self.module.a.weight.detach().sum()

    module, batch = CASES["conv"]()
    step = capture(module, batch, "conv")
    graph = problem(step, profile_costs(step))
    schedule = with_frees(graph, [o.name for o in graph.ops])
    found = {d.name for d in verify(Wrong(module, step, schedule), batch).differences}
    assert found - {"loss"} == {"gradient a.weight", "buffer norm.running_mean", "random state"}


def test_gradients_accumulate_and_share_no_memory() -> None:
    module, batch = CASES["shared_gradients"]()
    step = capture(module, batch, "shared")
    graph = problem(step, profile_costs(step))
    planned = PlannedStep(module, step, with_frees(graph, [o.name for o in graph.ops]))
    run_once(planned, batch)
    once = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    run_once(planned, batch)
    assert set(once) == {"a", "b", "c"}
    for n, g in once.items():
        assert torch.equal(module.get_parameter(n).grad, g + g)
    addresses = {module.get_parameter(n).grad.data_ptr() for n in once}
    assert len(addresses) == 3
    assert module.counter == 2


def test_random_ops_in_another_order_are_refused() -> None:
    module, batch = CASES["recurrent"]()
    step = capture(module, batch, "recurrent")
    graph = problem(step, profile_costs(step))
    runs = [o.name for o in graph.ops]
    assert len(graph.ordered) > 5
    free = [n for n in graph.ordered if {*graph.op[n].reads} <= {*graph.inputs, state_of(n)}]
    moved = [free[-1]] if free else []
    assert moved
    others = [n for n in runs if n not in moved and not saves_state(n)]
    schedule = with_frees(graph, with_saves(graph, moved + others))
    with pytest.raises(ProblemError, match="another order"):
        PlannedStep(module, step, schedule)


def test_a_schedule_that_frees_too_early_is_refused_when_compiled() -> None:
    module, batch = CASES["conv"]()
    step = capture(module, batch, "conv")
    graph = problem(step, profile_costs(step))
    schedule = list(with_frees(graph, [o.name for o in graph.ops]))
    first_backward = next(i for i, s in enumerate(schedule) if s == Run("nll_loss_backward"))
    written = {t for s in schedule[:first_backward] if isinstance(s, Run) for t in graph.op[s.op].writes}
    later = next(
        i for i in range(first_backward, len(schedule)) if getattr(schedule[i], "tensor", None) in written
    )
    schedule.insert(first_backward, schedule.pop(later))
    with pytest.raises(ProblemError, match="not resident"):
        PlannedStep(module, step, tuple(schedule))


class NoGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.w.detach()).sum()


class Shape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).sum()


@pytest.mark.parametrize(
    ("module", "batch", "message"),
    [
        (nn.ReLU(), (torch.randn(3),), "no trainable parameter"),
        (NoGradient(), (torch.randn(3),), "depends on a trainable"),
        (Shape(), (torch.randn(2, 5),), "cannot be traced"),
    ],
)
def test_what_has_no_training_step_is_refused_in_one_line(
    module: nn.Module, batch: tuple[Tensor, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        capture(module, batch, "bad")
    assert "\n" not in str(caught.value)


def test_profiles_are_cached_and_a_broken_cache_is_measured_again(tmp_path: Path) -> None:
    module, batch = CASES["conv"]()
    step = capture(module, batch, "conv")
    first = profile_costs(step, cache=tmp_path)
    assert profile_costs(step, cache=tmp_path) == first
    (file,) = tmp_path.iterdir()
    file.write_text("{ not json")
    again = profile_costs(step, cache=tmp_path)
    assert {n: c.workspace for n, c in again.items()} == {n: c.workspace for n, c in first.items()}
    assert all(c.time > 0 for c in again.values())


@torch.library.custom_op("rematplan_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """A user's operator that refuses all but whole numbers."""
    if not torch.equal(x, x.round()):
        raise ValueError("whole numbers only")
    return x * 2


picky.register_fake(torch.empty_like)
picky.register_autograd(lambda ctx, grad: grad * 2)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return picky(self.w * x).sum()


def test_a_call_that_refuses_synthetic_arguments_is_guessed_with_a_warning(tmp_path: Path) -> None:
    module, batch = Picky(), (torch.ones(4),)
    step = capture(module, batch, "picky")
    with pytest.warns(ProfileWarning, match="whole numbers only") as said:
        costs = profile_costs(step, cache=tmp_path)
    assert said[0].filename == __file__
    guessed = costs["picky"]
    assert guessed.time > 0
    assert guessed.workspace == 32
    with pytest.warns(ProfileWarning, match="whole numbers only"):
        assert profile_costs(step, cache=tmp_path) == costs
    graph = problem(step, costs)
    plan = plan_from_runs(graph, recompute_everything(graph), "everything")
    assert verify(PlannedStep(module, step, plan.schedule), batch).bit_equal


class Peeks(nn.Module):
    """Looks into its data to take a shortcut, unless it is being compiled, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x == 0).all()):
            return self.w.sum() * 0
        return (x * self.w).tanh().sum()


def test_a_model_that_looks_into_its_data_is_captured_as_for_a_compiler(tmp_path: Path) -> None:
    module, batch = Peeks(), (torch.randn(4),)
    step = capture(module, batch, "peeks")
    assert not torch.compiler.is_compiling()
    graph = problem(step, profile_costs(step, cache=tmp_path))
    schedule = with_frees(graph, [o.name for o in graph.ops])
    assert verify(PlannedStep(module, step, schedule), batch).bit_equal


def test_bits_of_conjugates_are_compared() -> None:
    a = torch.randn(3, dtype=torch.complex64)
    assert same_bits(a.conj(), a.conj().resolve_conj())
    assert not same_bits(a.conj(), a)
