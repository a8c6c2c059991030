"""What capture changes in PyTorch: the table names it, it is as before afterwards, and other threads do not see it."""

import gc
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rematplan import ModelError, plan_module
from rematplan.runtime.capture.patches.autocast_cache import casting_once
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.eager_kernels import native_kernels
from rematplan.runtime.capture.patches.patched_functions import PATCHES
from rematplan.runtime.capture.patches.size_arithmetic import OPERATIONS, sizes_computed_once
from rematplan.runtime.capture.patches.size_types import sizes_have_plain_types
from rematplan.runtime.capture.patches.trace_costs import only_what_is_read
from rematplan.runtime.capture.unrepeatable_draws import no_seeding
from rematplan.runtime.guards.attributes import reads_of
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols

ATEN = "torch.ops.aten."
IN_MODULES = " in the model's Python modules"
NAMES = sorted({name for row in PATCHES for name in row.what})


def kernels() -> dict[str, dict[Any, Any]]:
    """The Python kernels of all overloads of ATen's, by the op's name and overload."""
    names = {
        n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n[:6] == "aten::"
    }
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    return {
        f"{name}.{overload}": dict(getattr(packet, overload).py_kernels)
        for name, packet in packets.items()
        if packet is not None
        for overload in packet.overloads()
    }


def current(name: str) -> Any:
    """What stands now behind a name of the table."""
    if name == "dispatch modes":
        return list(_get_current_dispatch_mode_stack())
    if name == "tracing context":
        return TracingContext.try_get()
    if name.endswith(IN_MODULES):
        word = name.removesuffix(IN_MODULES)
        return [space for space, held in sys.modules.items() if word in getattr(held, "__dict__", ())]
    if name == "garbage collector":
        return gc.isenabled()
    if name.startswith("logger "):
        return logging.getLogger(name.removeprefix("logger ")).disabled
    if name.startswith(ATEN):
        pattern = name.removeprefix(ATEN).removesuffix(".py_kernels")
        return {op: held for op, held in kernels().items() if fnmatchcase(op.split(".")[0], pattern)}
    found = resolve_name(name)
    return type(found)(found) if isinstance(found, (dict, set)) else found


class Tiny(nn.Module):
    """Meets many of the patches: it draws, casts, checkpoints, asks for values, and has a recurrent part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
        y = torch.nn.functional.dropout(self.lstm(y.float())[0], 0.5)
        return y.prod() if x.detach().tolist()[0][0][0] > 9 else y.sum()


@pytest.mark.parametrize("module", sorted({row.where for row in PATCHES}))
def test_the_modules_that_patch_exist(module: str) -> None:
    assert find_spec(module)


@pytest.mark.parametrize("row", PATCHES, ids=lambda row: row.what[0])
def test_a_row_says_everything(row: Any) -> None:
    assert row.what
    assert row.why
    assert row.versions
    assert row.threads
    assert row.undone


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(ATEN)])
def test_patterns_name_ops(name: str) -> None:
    assert current(name)


def test_a_capture_leaves_pytorch_as_it_was() -> None:
    before = {name: current(name) for name in NAMES}
    every = kernels()
    planned = plan_module(Tiny(), (torch.randn(2, 3, 4),), budget="1GiB", costs="roofline")
    planned(torch.randn(2, 3, 4)).backward()
    planned(torch.randn(2, 5, 4)).backward()  # captured with open sizes
    for name in NAMES:
        assert current(name) == before[name], name
    assert kernels() == every


def test_a_capture_that_fails_leaves_pytorch_as_it_was() -> None:
    class Seeding(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            return super().forward(x)

    before = {name: current(name) for name in NAMES}
    with pytest.warns(UserWarning, match="seeds"):
        plan_module(Seeding(), (torch.randn(2, 3, 4),), budget="100%", costs="roofline")
    for name in NAMES:
        assert current(name) == before[name], name


def test_kernels_that_are_replaced_are_in_the_table() -> None:
    before = kernels()
    with native_kernels():
        within = kernels()
    patterns = [
        name.removeprefix(ATEN).removesuffix(".py_kernels") for name in NAMES if name.startswith(ATEN)
    ]
    changed = {op for op, held in within.items() if held != before[op]}
    assert changed
    assert {op for op in changed if not any(fnmatchcase(op.split(".")[0], p) for p in patterns)} == set()


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_another_thread_may_seed() -> None:
    with no_seeding():
        assert elsewhere(lambda: torch.manual_seed(3).initial_seed()) == 3
        with pytest.raises(ModelError, match="seeds"):
            torch.manual_seed(3)


def test_sizes_have_plain_types_only_inside_the_block_and_in_its_thread() -> None:
    size = torch.SymInt(object())
    before = current("isinstance in the model's Python modules")

    def plain() -> bool:
        return isinstance(size, int)

    with pytest.raises(ValueError, match="inside"), sizes_have_plain_types(Tiny()):  # noqa: PT012
        assert __name__ in current("isinstance in the model's Python modules")
        assert plain()
        assert not isinstance(size, (float, torch.SymInt))
        assert not elsewhere(plain)
        raise ValueError("inside")
    assert current("isinstance in the model's Python modules") == before
    assert not plain()


def sizes() -> tuple[torch.SymInt, torch.SymInt]:
    """Two symbolic sizes of one tensor."""
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(
        torch.ones(3, 5), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    )
    return fake.shape[0], fake.shape[1]


def test_sizes_are_computed_once_only_inside_the_block_and_in_its_thread() -> None:
    a, b = (size.node for size in sizes())
    for name in OPERATIONS[:-3]:
        operation = getattr(type(a), name)
        outside = operation(a, b)
        with sizes_computed_once():
            first = getattr(a, name)(b)
            assert getattr(a, name)(b) is first
            assert str(first) == str(outside)
            assert first.hint == outside.hint
            assert getattr(b, name)(a) is not first
            assert elsewhere(lambda name=name: getattr(a, name)(b)) is not first
        assert getattr(type(a), name) is operation


def test_sizes_that_are_computed_once_keep_their_guards() -> None:
    a, b = sizes()
    with sizes_computed_once():
        guards = a.node.shape_env.guards
        assert a + b == 8
        assert len(guards) == 1
        assert a * b != 8
        assert a + b == 8
        assert len(guards) == 2


def test_outcomes_that_are_kept_add_their_guards_when_these_are_wanted() -> None:
    symbols = BatchSymbols()
    (x,) = symbols.begin(FakeTensorMode(shape_env=symbols.shapes), [torch.ones(3, 5)])
    a, b = x.shape
    with symbols.shapes.suppress_guards():
        assert a + b == 8
    assert not symbols.shapes.guards
    for _ in range(2):
        assert a + b == 8
        assert len(symbols.shapes.guards) == 1


def test_collecting_cycles_goes_on_only_if_it_was_on() -> None:
    for on in (False, True):
        (gc.enable if on else gc.disable)()
        with only_what_is_read():
            assert not gc.isenabled()
        assert gc.isenabled() is on


@pytest.mark.parametrize("reentrant", [True, False])
def test_another_thread_has_its_checkpoints(reentrant: bool) -> None:
    runs: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant).sum().backward()

    with without_checkpoints():
        elsewhere(step)
        assert len(runs) == 2
        step()
        assert len(runs) == 3


def test_another_thread_has_its_autocast_cache() -> None:
    cleared: list[int] = []
    weight = torch.ones(2, 2, requires_grad=True)

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            weight @ weight

    with patch.object(torch, "clear_autocast_cache", lambda: cleared.append(1)), casting_once([weight], True):
        elsewhere(cast)
        assert cleared == [1]
        cast()
        assert cleared == [1]


def test_another_thread_lays_out_recurrent_weights() -> None:
    flattened: list[int] = []
    layer = nn.LSTM(2, 2)
    with patch.object(nn.RNNBase, "flatten_parameters", lambda self: flattened.append(1)), native_kernels():
        layer.flatten_parameters()
        assert flattened == []
        elsewhere(layer.flatten_parameters)
        assert flattened == [1]


def test_what_another_thread_reads_and_sets_is_not_noted() -> None:
    module = nn.Linear(2, 2)
    with reads_of([module]) as reads:
        elsewhere(lambda: (module.in_features, setattr(module, "note", 1)))
        assert not reads.found
        assert not reads.fresh
        assert module.out_features == 2
        module.own = 1
    assert {name for _, name in reads.found} >= {"out_features"}
    assert {name for _, name in reads.fresh} == {"own"}
