"""The refusals of `plan_pipeline`, one line each, and what a planned pipeline prints."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import planned_tasks
import pytest
import torch
from one_process import data, loss
from torch import distributed, nn

import rematplan
from rematplan.ir import InfeasibleBudget, ModelError, RematplanError, UsageError
from rematplan.module import forward_capture
from rematplan.pipeline import plan_pipeline
from rematplan.pipeline.auto_cuts import agreed
from rematplan.pipeline.captured_stages import CapturedStage
from rematplan.pipeline.schedules import schedule_named
from rematplan.planner.core.plan import plan_to_json
from rematplan.planner.core.schedule import Run
from rematplan.planner.pipeline.messages import CONNECTING, RANDOM_STATE, message_memory
from rematplan.planner.pipeline.stage_plan import MessageBytes
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.runtime.graph.compat import STEPS_COPY_RANDOM_STATE
from rematplan.runtime.pipeline import action_lists

ASKED: dict[str, Any] = {
    "stages": 4,
    "microbatches": 8,
    "budget": "100%",
    "costs": "roofline",
    "strategy": "store_all",
    "cuts": ["blocks.1", "blocks.2", "blocks.3"],
}


def net(**more: Any) -> planned_tasks.Net:
    return planned_tasks.net(**{"blocks": 4} | more)


def planned(
    model: nn.Module | None = None, rows: int = 64, x: torch.Tensor | None = None, **more: Any
) -> rematplan.Pipeline:
    x = planned_tasks.data(rows)[0] if x is None else x
    return rematplan.plan_pipeline(model or net(), (x,), **ASKED | more)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"schedule": "2f2b"}, UsageError, "unknown schedule '2f2b'; known: gpipe"),
        ({"rows": 60}, UsageError, "shape \\(60, 5\\) cannot be divided into 8 equal micro-batches"),
        ({"microbatches": 2}, UsageError, "at least as many micro-batches as ranks"),
        ({"schedule": "zbv", "stages": 5}, UsageError, "5 stages are not a multiple"),
        ({"stages": 0}, UsageError, "stages is 0; it must be a whole number of at least 1"),
        ({"microbatches": 2.5}, UsageError, "microbatches is 2.5; it must be a whole number"),
        ({"hop": "1us"}, UsageError, "hop is '1us'"),
        ({"ranks": 0}, UsageError, "ranks is 0; it must be a list"),
        ({"ranks": [0.0]}, UsageError, "ranks is .0.0.; it must be a list"),
        ({"cuts": None}, UsageError, "cuts is None"),
        ({"cuts": [1, 2, 3]}, UsageError, "cuts is .1, 2, 3."),
        ({"plans": 5}, UsageError, "plans must be a dictionary"),
        ({"plans": {0: 5}}, UsageError, "plans must be a dictionary"),
        ({"replicas": "2"}, UsageError, "replicas is '2'; it must be a whole number"),
        ({"schedule": "dataflow", "hop": float("nan")}, UsageError, "hop is nan"),
        ({"ranks": [4]}, UsageError, "ranks has 4; the ranks of this pipeline are 0 to 3"),
        ({"cuts": "blocks.1"}, UsageError, "4 stages need 3 cuts, not 1"),
        ({"cuts": "blocks.1,blocks.2,no"}, UsageError, "cannot be cut at 'no'; similar: "),
        ({"cuts": "blocks.2,blocks.1,blocks.3"}, UsageError, "'blocks.1' does not come after"),
        ({"shards": 0}, UsageError, "shards is 0; it must be a whole number of at least 1"),
        (
            {"shards": 2, "replicas": 2},
            UsageError,
            "shards .FSDP2. or replicas .DistributedDataParallel., not both",
        ),
        ({"budget": "min"}, UsageError, "budget 'min' is not possible here"),
        ({"strategy": rematplan.Auto(two_lanes="on")}, UsageError, "cannot be combined with two lanes"),
        ({"strategy": rematplan.SavedPlan("x.json")}, UsageError, "cannot be combined with a saved plan"),
        ({"split": "auto", "plans": {}}, UsageError, "plans has no plan of stage 0"),
        ({"split": {"block": 2}}, UsageError, "no stage has ops of a module 'block'; similar: blocks"),
        (
            {"kernels": "fused", "schedule": "dataflow"},
            UsageError,
            "dataflow cannot be combined with kernels='fused'",
        ),
        (
            {"split": {"head": 2}, "schedule": "dataflow"},
            UsageError,
            "dataflow cannot be combined with split",
        ),
        (
            {"policy": ["blocks.9"], "ranks": None},
            UsageError,
            "neither a module nor an op of Net; similar: blocks",
        ),
        ({"policy": ["head"], "schedule": "dataflow"}, UsageError, "dataflow cannot be combined with policy"),
        ({"inverses": True}, UsageError, "1f1b cannot be combined with inverses; they are for dataflow"),
        ({"budget": "1KiB"}, InfeasibleBudget, "rank 0: budget 1.00 KiB"),
        ({"plans": {}}, UsageError, "no plan of stage 0, which rank 0 runs; it has plans of stages none"),
        ({"loss_fn": loss}, UsageError, "both loss_fn and target"),
        ({"loss_fn": loss, "target": data(64)[1], "loss_memory": "3x"}, UsageError, "not both"),
        ({"loss_fn": loss, "target": data(60)[1]}, UsageError, "cannot be divided into 8 equal"),
        (
            {"loss_fn": nn.functional.binary_cross_entropy, "target": data(64)[1]},
            ModelError,
            "loss of a micro-batch cannot be",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    more: dict[str, Any], error: type[RematplanError], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        planned(**{"ranks": [0]} | more)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (None, (torch.ones(4, 2),), None, "model is a NoneType; it must be a torch.nn.Module"),
        (nn.Linear(2, 2), None, None, "args is a NoneType"),
        (nn.Linear(2, 2), (torch.ones(4, 2),), 5, "kwargs is a int"),
    ],
)
def test_a_call_of_other_kinds_is_refused(model: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rematplan.plan_pipeline(model, args, kwargs, microbatches=2, budget="1GiB")


def test_splits_are_chosen_for_a_rank_that_needs_them(caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {"stages": 2, "microbatches": 2, "rows": 2 * 1024, "sizes": {"blocks": 2}}
    asked |= {
        "schedule": "gpipe",
        "ranks": [0],
        "budget": "560KiB",
        "strategy": rematplan.Auto(time_limit=0.1),
    }
    with pytest.raises(InfeasibleBudget):
        planned_tasks.planned(**asked)
    with caplog.at_level("INFO", "rematplan"):
        pipe = planned_tasks.planned(**asked, split="auto")
    assert "NetStage0: split blocks.0 in" in caplog.text
    assert pipe.ranks[0].peak <= 560 * 1024
    part = pipe.parts[0]
    assert isinstance(part, CapturedStage)
    plain, planned_ = copy.deepcopy(part.stage.module), part.planned(pipe.ranks[0].plans[0])
    x = torch.randn(1024, 5)
    found, expected = (module(x, **planned_tasks.NAMED) for module in (planned_, plain))
    assert torch.equal(found, expected)
    for one in (found, expected):
        one.square().sum().backward()
    for one, other in zip(planned_.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    plan = pipe.ranks[0].plans[0]
    again = planned_tasks.planned(**asked, split="auto", plans={0: plan_to_json(plan)})
    assert again.ranks[0].plans[0].schedule == plan.schedule
    assert again.ranks[0].peak == pipe.ranks[0].peak


def test_a_parameter_of_two_stages_is_refused_by_name() -> None:
    model = net()
    model.blocks[3].up.weight = model.blocks[0].up.weight
    with pytest.raises(ModelError, match=r"share the parameter blocks\.0\.up\.weight, blocks\.3\.up\.weight"):
        planned(model)


class Branching(nn.Module):
    """A forward that asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_cuts_are_chosen_so_that_a_shared_parameter_is_in_one_stage() -> None:
    model = net()
    model.blocks[3].up.weight = model.blocks[0].up.weight
    pipe = planned(model, stages=2, cuts="auto")
    shared = model.blocks[0].up.weight
    assert sum(p is shared for part in pipe.parts.values() for p in part.stage.module.parameters()) == 1


def test_a_stage_is_captured_again_only_if_its_state_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, names = forward_capture.capture, []

    def counted(*given: Any) -> Any:
        names.append(given[2])
        return capture(*given)

    monkeypatch.setattr(forward_capture, "capture", counted)
    pipe = planned(net(width=17), ranks=[1], budget="1GiB")  # as no other test captures
    pipe.modules(1)
    assert names == ["NetStage1"]
    next(pipe.parts[1].stage.module.parameters()).requires_grad_(False)
    with pytest.raises(ModelError, match="runs other ops"):
        pipe.modules(1)
    assert names == ["NetStage1"] * 2


def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 100_000))
    more = ASKED | {"stages": 2, "microbatches": 2, "budget": "1GiB", "cuts": "auto", "ranks": [0]}
    assert rematplan.plan_pipeline(wide, (torch.zeros(128, 64),), **more).cuts == ("4",)


def test_a_forward_that_cannot_be_exported_is_refused_in_a_line() -> None:
    with pytest.raises(ModelError, match="Branching cannot be cut into stages") as refused:
        planned(Branching())
    assert "\n" not in str(refused.value)


class Detached(planned_tasks.Net):
    """A model whose head gets no gradient of its input."""

    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return super().forward(x, scale).detach()


@pytest.mark.parametrize(
    ("model", "schedule", "message"),
    [
        (net(frozen=(0,), embed=False), "dataflow", "stage 0 computes no gradients, so a dataflow"),
        (Detached(), "1f1b", "stage 3 computes no gradients, so nothing before it can be trained"),
    ],
)
def test_a_stage_without_gradients_is_refused_where_it_needs_a_backward(
    model: nn.Module, schedule: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        planned(model, schedule=schedule)


def test_measuring_a_frozen_stage_leaves_its_buffers_and_the_generator_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(action_lists, "SENT_OUTPUTS_ARE_FREED", False)
    monkeypatch.setattr(plan_pipeline, "MESSAGES_HAVE_GRADIENTS", False)
    model = net(frozen=(0,), embed=False, dropout=0.5)
    buffers, drawn = [b.clone() for b in model.buffers()], torch.get_rng_state()
    pipe = planned(model, ranks=[0], budget="1GiB")
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    (figures,) = pipe.stage_plans
    assert (figures.held.kept, figures.held.gradients, figures.times.backward) == (8 * 16 * 4, 0, 0.0)
    assert pipe.modules(0) == (pipe.parts[0].stage.module,)


def test_frozen_stages_are_refused_where_each_message_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in PyTorch 2.11, which would pass the first trained stage an input that needs a gradient."""
    monkeypatch.setattr(plan_pipeline, "MESSAGES_HAVE_GRADIENTS", True)
    with pytest.raises(UsageError, match="stage 1 receives a tensor that needs no gradient, and PyTorch"):
        planned(net(frozen=(0,), embed=False), ranks=[3])
    planned(net(frozen=(0,)), ranks=[3], budget="1GiB")


@functools.cache
def whole() -> tuple[nn.Module, rematplan.Pipeline]:
    """A network and its pipeline, which tests only read."""
    model = net()
    return model, planned(model)


def test_a_rank_is_refused_one_byte_below_its_peak() -> None:
    _, pipe = whole()
    rank, least = max(pipe.peaks.items(), key=lambda one: one[1])
    assert planned(budget=least, ranks=[rank]).peaks[rank] == least
    with pytest.raises(InfeasibleBudget, match="rank") as refused:
        planned(budget=least - 1, ranks=[rank])
    assert refused.value.smallest == least


def test_another_value_of_a_fixed_argument_is_refused() -> None:
    model = net()
    given = planned_tasks.data(64)[0], planned_tasks.SCALE
    pipe = rematplan.plan_pipeline(model, given, **ASKED, ranks=[0])
    first = pipe.parts[0].stage
    with pytest.raises(ModelError, match=r"scale = 0\.25, not 0\.5"):
        first.module(torch.zeros(8, 5), 0.5)


def test_stages_of_another_type_than_planned_are_refused() -> None:
    pipe = planned(net(), ranks=[1])
    (second,) = pipe.modules(1, prepared=False)
    given = torch.zeros(pipe.parts[1].stage.inputs[0].shape)
    second.bfloat16()
    with pytest.raises(ModelError, match="ops of other types, than those that it was planned for"):
        second(given.bfloat16())


def test_stages_have_the_models_parameters_under_its_names() -> None:
    model, pipe = whole()
    named = dict(model.named_parameters())
    found = {n: p for part in pipe.parts.values() for n, p in part.stage.module.named_parameters()}
    assert all(found[name] is named[name] for name in found)
    assert named.keys() - found.keys() == {name for name in named if name.endswith("unused")}


def test_a_skipping_tensor_passes_through_each_stage() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = y = self.layers[0](x)
            for layer in self.layers[1:]:
                y = torch.tanh(layer(y))
            return torch.cat([first, y], 1)

    pipe = planned(Skip(), stages=4, cuts="layers.1,layers.2,layers.3")
    assert [len(pipe.parts[s].stage.inputs) for s in range(4)] == [1, 1, 2, 2]
    assert "rank 3 stage 3: 1 in flight" in str(pipe)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_outputs_that_the_backward_reads_stay_though_torch_frees_what_is_sent(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage ends with a layer whose output no backward reads, the second one with a tanh."""
    layers = (nn.Linear(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    figures = {}
    for frees in (False, True):
        monkeypatch.setattr(action_lists, "SENT_OUTPUTS_ARE_FREED", frees)
        asked = {"schedule": schedule, "stages": 3, "microbatches": 4, "cuts": ["1", "3"]}
        figures[frees] = planned(nn.Sequential(*layers), x=torch.zeros(8, 16), **asked).stage_plans
    assert [one.held.loose for one in figures[False]] == [0, 0, 0]
    assert [one.held.loose for one in figures[True]] == [4 * 2 * 16, 0, 0]
    kept, freed = figures[False][0], figures[True][0]
    assert kept.held.kept - freed.held.kept == freed.held.loose == freed.messages.sent
    assert figures[False][1:] == figures[True][1:]


def test_an_unexpected_error_of_the_first_rank_does_not_leave_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda found, src: sent.extend(found))

    def choose() -> tuple[str, ...]:
        raise KeyError(42)

    with pytest.raises(KeyError):
        agreed(choose)
    assert sent == [None, "42"]


def test_autograd_holds_gradients_of_outputs_until_the_first_segment_ends() -> None:
    """A segment returns gradients of parameters. Only the op before the first of these reads the output's gradient."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    found = planned(model, x=torch.zeros(8, 16), stages=2, microbatches=2, cuts=["1"], ranks=[1])
    problem = found.parts[1].problem
    schedule = no_recompute(problem.graph).schedule
    (tangent,) = problem.tangents
    reads = [
        at
        for at, one in enumerate(schedule)
        if isinstance(one, Run) and tangent in problem.graph.op[one.op].reads
    ]
    assert problem.tangents_held is not None
    assert len(schedule) >= problem.tangents_held(schedule) > schedule.index(Run("mm")) > reads[-1]


def test_a_stage_that_trains_nothing_keeps_nothing_for_the_gradients_of_weights() -> None:
    """Neither new contents of buffers, nor the gradients of the outputs, nor what the loss leaves until the step ends,
    which counts once for each micro-batch."""
    model = net(blocks=8, frozen=(3, 7), outputs=256)
    model.head.requires_grad_(False)
    more = {"schedule": "interleaved-zb", "stages": 8, "cuts": [f"blocks.{k}" for k in range(1, 8)]}
    found = planned(model, loss_fn=loss, target=torch.zeros(64, 256), **more).stage_plans
    assert [one.held.deferred for one in (found[3], found[7])] == [0, 0]
    assert found[7].standing.left > 4 * 8 * 256  # outputs of a micro-batch


def test_a_count_of_batches_is_freed_after_the_forward() -> None:
    """No op of the backward reads it."""
    problem = planned(stages=2, cuts=["blocks.2"], ranks=[0]).parts[0].problem
    assert [problem.graph.size[t] for t in problem.leaving] == [8] * 2
    kept = problem.measured(no_recompute(problem.graph)).held.kept
    same = replace(problem, leaving=())
    assert same.measured(no_recompute(problem.graph)).held.kept == kept + 2 * 8


def test_the_state_of_the_random_generator_has_the_bytes_that_are_counted() -> None:
    assert torch.get_rng_state().nbytes == RANDOM_STATE
    counted = RANDOM_STATE if STEPS_COPY_RANDOM_STATE else 0
    assert {part.problem.template.standing.opening for part in planned().parts.values()} == {counted}


def test_the_numbers_that_connect_ranks_are_counted_once_in_each() -> None:
    for name in ("gpipe", "zbv"):
        schedule = schedule_named(name, 4, 8)
        found = [message_memory(schedule, s, MessageBytes(0, 0, 0, 0)) for s in range(schedule.stages)]
        assert [plan.standing.torch_bytes for plan in found] == [CONNECTING] * 4 + [0] * (schedule.stages - 4)


def test_what_a_policy_names_is_saved_in_its_stage() -> None:
    def saved(**more: Any) -> set[tuple[str, str]]:
        pipe = planned(cuts=["blocks.2"], stages=2, microbatches=2, **more)
        return {
            (call.module, str(call.target))
            for part in pipe.parts.values()
            for name in part.problem.graph.never_rerun
            if (call := part.step.call.get(name)) and not call.backward
        }

    found = saved(policy=["blocks.1.up", "blocks.3.down", "aten.tanh"]) - saved()
    products = {(module, "aten.addmm.default") for module in ("blocks.1.up", "blocks.3.down")}
    assert found == products | {(f"blocks.{k}", "aten.tanh.default") for k in range(4)}
