"""Laws of the guards' interface: a module's state has an equal key exactly if its plans hold for it, and values that
were found are compared as Python tells them apart."""

import copy
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from rematplan.ir import ModelError
from rematplan.module.captures import capture_call
from rematplan.runtime import guards
from rematplan.runtime.guards.attributes import reads_of
from rematplan.runtime.guards.bulk_comparison import Namespaces, Table, picked
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.guards.module_state import StateKey
from rematplan.runtime.guards.snapshots import kept

MODULE = Path(__file__).parents[3] / "rematplan" / "module"


@pytest.mark.parametrize("name", ["runner", "cached_plans", "captures"])
def test_a_planned_module_knows_only_the_front_of_the_guards(name: str) -> None:
    lines = (MODULE / f"{name}.py").read_text().splitlines()
    imports = [line for line in lines if "guards" in line and "import" in line]
    assert imports == ["from rematplan.runtime import guards"]


class Net(nn.Module):
    """Tied weights, a buffer, places for a bias and a part that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.act, self.parts = nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Dropout())
        self.register_buffer("scale", torch.ones(4))


def key(tree: guards.ModuleTree, net: nn.Module) -> StateKey:
    state = tree.state(net)
    return (state or guards.ModuleTree(net).state(net)).key


def set_data(net: Net, data: Tensor) -> None:
    net.second.bias.data = data


CHANGES: dict[str, Callable[[Net], Any]] = {
    "another shape": lambda n: set_data(n, torch.ones(5)),
    "other strides": lambda n: set_data(n, torch.ones(8)[::2]),
    "another type": lambda n: set_data(n, torch.ones(4).double()),
    "to be negated": lambda n: setattr(n, "scale", torch.ones(4, dtype=torch.complex64).conj().imag),
    "no gradient": lambda n: n.second.bias.requires_grad_(False),
    "no tensor": lambda n: setattr(n.second, "bias", None),
    "a tensor where none was": lambda n: setattr(n.first, "bias", nn.Parameter(torch.ones(4))),
    "untied": lambda n: setattr(n.second, "weight", nn.Parameter(torch.ones(4, 4))),
    "a further buffer": lambda n: n.act.register_buffer("scale", torch.ones(4)),
    "another name": lambda n: n._buffers.update(weight=n._buffers.pop("scale")),
    "another part": lambda n: setattr(n, "act", nn.Tanh()),
    "a further part": lambda n: n.act.add_module("x", nn.Tanh()),
    "a class": lambda n: setattr(n.act, "__class__", nn.Tanh),
    "a mode": lambda n: n.parts[1].eval(),
    "a hook": lambda n: n.act.register_forward_hook(print),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_module_has_another_key_and_an_equal_one_the_same(change: Callable[[Net], Any]) -> None:
    net = Net()
    tree = guards.ModuleTree(net)
    before = key(tree, net)
    assert key(tree, net) is before  # found without looking at the tensors one by one
    other = copy.deepcopy(net)
    assert key(guards.ModuleTree(other), other) == before
    change(net)
    after = key(tree, net)
    assert after != before
    assert key(tree, net) == after
    assert key(guards.ModuleTree(net), net) == after


def test_a_parameter_that_moves_to_the_next_module_changes_the_key() -> None:
    """The names of all parameters in a row are the same as before."""
    net = nn.Sequential(nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)}), nn.ParameterDict())
    net[1].register_parameter("c", nn.Parameter(torch.ones(2)))
    tree = guards.ModuleTree(net)
    before = key(tree, net)
    moved, last = net[0]._parameters.pop("b"), net[1]._parameters.pop("c")
    net[1]._parameters.update(b=moved, c=last)
    assert key(tree, net) != before


def test_namespaces_remember_a_limited_number_of_picks() -> None:
    namespaces = Namespaces([{"a": 1}, {"a": 2}, {"a": 3}])
    for at in (*range(200), 2):
        pick = picked([at % 3, 0])
        assert namespaces.pick(pick) == (namespaces[at % 3], namespaces[0])
        assert namespaces.pick(pick) is namespaces.pick(pick)
    assert len(namespaces._picked) < 100


def test_new_tensors_of_the_same_kind_have_the_same_key() -> None:
    net = Net()
    tree = guards.ModuleTree(net)
    before = key(tree, net)
    net.load_state_dict(Net().state_dict(), assign=True)
    net.first.weight = net.second.weight
    net.scale = torch.zeros(4)
    assert key(tree, net) == before
    state = tree.state(net)
    assert state is not None
    assert all(state.named[name] is t for name, t in net.named_parameters())
    assert state.named["scale"] is net.scale


@pytest.mark.parametrize("block", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode])
def test_what_is_set_for_a_block_does_not_change_the_key_of_the_module(block: Callable[[], Any]) -> None:
    net = Net()
    tree = guards.ModuleTree(net)
    before = key(tree, net)
    with block():
        assert key(tree, net) == before
    assert key(tree, net) == before


SAME = [
    ([1, 2], [1, 2]),
    ({"a": 1.0}, {"a": float("1.0")}),
    (2.0, float("2.0")),
    ("ab" * 9, "".join(["ab"] * 9)),
]
OTHER = [(1, True), (1, 1.0), (0.0, -0.0), ([1, 2], [1, 2.0]), ([1], [1, 2]), ({"a": 1}, {"b": 1}),
         ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ((1,), [1]), (torch.ones(2), torch.ones(2))]  # fmt: skip


@pytest.mark.parametrize(("then", "now", "same"), [(*p, True) for p in SAME] + [(*p, False) for p in OTHER])
@pytest.mark.parametrize("many", [False, True])
def test_values_are_compared_with_their_types(then: Any, now: Any, same: bool, many: bool) -> None:
    more = {"x": None, "y": "z"} if many else {}
    table = Table([(1, {"value": kept(then), **more}), (0, {"w": 1} if many else {})])
    assert table.holds(Namespaces([{"w": 1}, {"value": then, **more}]))
    assert table.holds(Namespaces([{"w": 1}, {"value": now, **more}])) == same
    if many:
        assert not table.holds(Namespaces([{"w": 2}, {"value": then, **more}]))


def test_a_decision_after_writing_leaves_the_inputs_alone() -> None:
    batch = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    recorder = ValueGuardRecorder({}, batch)
    traced = [t.clone() for t in batch]
    with recorder:
        recorder.begin({}, traced)
        traced[0][:1].add_(traced[1])
        assert bool((traced[0].sum() > 5).item())
    guard = recorder.guard()
    assert guard.written == {0}
    for first, holds in ((1.0, True), (0.5, True), (-9.0, False)):
        given = [torch.tensor([first, 2.0]), torch.tensor([3.0])]
        assert guard.holds({}, given) == holds
        assert given[0].tolist() == [first, 2.0]


class Asking(nn.Module):
    """Computes with a number of a buffer; if ``failing``, draws as a fixed graph cannot."""

    def __init__(self, failing: bool) -> None:
        super().__init__()
        self.linear, self.failing = nn.Linear(4, 4), failing
        self.register_buffer("many", torch.arange(40000.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.many.sin().sum().item()
        if self.failing:
            scale = random.random()
        return self.linear(x) * scale


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_a_trace_stays_in_memory(failing: bool) -> None:
    """Not even until Python collects cycles: the first planned step would exceed its budget by it."""

    def alive() -> int:
        sizes = (5056, 40000)
        return sum(type(t) is Tensor and t.numel() in sizes for t in gc.get_objects())

    model = Asking(failing)
    before = alive()
    gc.disable()
    try:
        with suppress(ModelError):
            capture_call(model, (torch.randn(2, 4),), {})
        assert alive() == before
    finally:
        gc.enable()


def test_the_tracers_work_on_graphs_is_not_recorded() -> None:
    """A module that was traced before has a graph of the classes that a tracer works with."""
    net = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with reads_of([*net.modules()]) as reads:
        fx.symbolic_trace(nn.Tanh())
        net(torch.ones(4))
    assert not reads.kinds & {fx.Graph, fx.Node}
    assert (0, ()) in reads.inherited
