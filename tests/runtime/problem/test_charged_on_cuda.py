"""What a step on CUDA is charged, and refused, shown without a device: its fakes only say that they are on one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rematplan.ir import ModelError
from rematplan.planner.core.lane_schedule import Sharing
from rematplan.planner.strategies.chen_sqrt import ChenSqrt
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans import two_lane_plans
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.read_fx import _on_one_device
from rematplan.runtime.costs.profile_json import profile_of, read_profile, save_profile
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.problem import planning_problem as step_problem
from rematplan.runtime.problem.planning_problem import training_graph

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
MIB = 2**20


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sum()


def small() -> CapturedStep:
    return capture(Small(), (torch.randn(3, 6),), "small")


def moved(step: CapturedStep, places: dict[str, torch.device], rest: torch.device = CUDA) -> CapturedStep:
    """The step with its values' fakes on other devices: those named, and the rest."""
    mode = FakeTensorMode()

    def there(name: str, fake: Tensor) -> Tensor:
        shapes = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        return FakeTensor(mode, shapes, places.get(name, rest))

    return replace(step, values={n: replace(v, fake=there(n, v.fake)) for n, v in step.values.items()})


@pytest.mark.parametrize(
    "size", [0, 1, 512, 513, 70_000, MIB, MIB + 1, 11 * MIB, 11 * MIB + 600_000, 64 * MIB]
)
def test_an_allocation_is_no_less_than_its_bytes_and_little_more(size: int) -> None:
    assert allocated(size, CPU) == size
    charged = allocated(size, CUDA)
    assert size <= charged <= size + (512 if size <= MIB else MIB + 512)
    assert charged % 512 == 0
    assert charged >= allocated(max(0, size - 1), CUDA)


def test_on_cuda_every_storage_is_whole_blocks() -> None:
    step = small()
    there = moved(step, {})
    for name, size in step.storage_bytes.items():
        assert there.storage_bytes[name] == allocated(size, CUDA)
    costs = {c.name: CallCost(1.0, 0, (700,)) for c in there.priced_calls}
    graph = training_graph(there, costs)
    assert all(t.bytes % 512 == 0 for t in graph.tensors)
    assert max(t.bytes for t in graph.tensors if t.name != "library_workspaces") == 1024  # of the real sizes


def test_what_libraries_keep_is_held_all_along_in_both_threads() -> None:
    step = small()
    costs = {c.name: CallCost(1.0) for c in step.priced_calls}
    plain = training_graph(step, costs)
    kept = training_graph(
        step, {name: replace(c, library=5000 + k) for k, (name, c) in enumerate(costs.items())}
    )
    most = 5000 + len(costs) - 1
    assert kept.fixed_split["library_workspaces"] == 2 * most
    assert no_recompute(kept).estimate.peak == no_recompute(plain).estimate.peak + 2 * most


def test_a_recovery_lane_needs_room_for_what_libraries_keep_for_its_thread() -> None:
    assert (two_lane_plans.LIBRARIES, two_lane_plans.THREADS) == (
        step_problem.LIBRARIES,
        step_problem.THREADS,
    )

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    step = capture(Deep(), (torch.randn(64, 8),), "deep")
    costs = {c.name: CallCost(1.0, library=1000) for c in step.priced_calls}
    graph = training_graph(step, costs)
    plan = ChenSqrt().curve(graph, ())[-1]
    for more, lanes in ((0, False), (999, False), (1000, True)):
        wanted = replace(plan, budget=plan.estimate.peak + more)
        found, said = two_lane_plans.overlapped(graph, wanted, "on", Sharing)
        assert (found.lanes is not None, found.budget) == (lanes, wanted.budget)
        assert lanes or "1000 B that libraries keep" in said[0]


def test_a_profile_says_what_libraries_keep(tmp_path) -> None:
    step, file = small(), tmp_path / "profile.json"
    costs = {c.name: CallCost(1.0, 2, (3,), 4) for c in step.priced_calls}
    save_profile(profile_of(step, costs), file)
    assert read_profile(file).costs(step) == costs
    file.write_text(file.read_text().replace("],\n4\n", "]\n"))  # as files were before
    assert read_profile(file).costs(step) == {n: replace(c, library=0) for n, c in costs.items()}


def test_a_step_is_where_its_accelerator_is() -> None:
    step = small()
    first = step.inputs[0].value
    assert moved(step, {first: CPU}).device == CUDA
    assert moved(step, {}, CPU).device == CPU
    assert _on_one_device(moved(step, {first: CPU})).devices == (CPU, CUDA)


def test_a_step_on_two_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # there may be one device only
    step = small()
    with pytest.raises(ModelError, match="spread over cuda:1 and cuda:0"):
        _on_one_device(moved(step, {step.inputs[0].value: OTHER}))


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        value, at = (self.weight * x).max(0, keepdim=True)
        return (value * x.index_select(0, at)).sum()


def test_small_further_results_are_those_of_the_kernel() -> None:
    """They may be in another memory than the trace says, as the seeds of attention are."""
    step = capture(Largest(), (torch.randn(40),), "largest")
    maker = next(c for c in step.calls if c.target is torch.ops.aten.max.dim)
    reader = next(c for c in step.calls if c.target is torch.ops.aten.index_select.default)
    made = SyntheticArguments(step)
    (product, *_), _ = made.of(maker)
    (_, _, at), _ = made.of(reader)
    assert at.item() == product.argmax().item() > 0
