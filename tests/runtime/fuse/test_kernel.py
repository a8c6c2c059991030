"""What is compiled: ops of mixed types under autocast, sums of many rows, and the distance by which kernels are
checked."""

from __future__ import annotations

import os
import shutil
from threading import Thread

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.compiler import config
from torch.nn import functional

from rematplan.module.captures import capture_call
from rematplan.runtime.fuse import inductor, kernel
from rematplan.runtime.fuse.channels_last import in_channels_last
from rematplan.runtime.fuse.fuse import Kernels, fuse
from rematplan.runtime.fuse.open_sizes import RegionSizes, SizeSymbols
from rematplan.runtime.graph import compat
from rematplan.runtime.graph.tracked_sizes import OpenSizes, TrackedSize, track

COMPILES = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="no C++ compiler"
)
ATEN = torch.ops.aten


class Norms(nn.Module):
    """Each norm reads what a library call makes in bfloat16 under autocast, and has parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch_norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.second, self.group_norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)
        self.third, self.layer_norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.batch_norm(self.first(x)))
        y = functional.silu(self.group_norm(self.second(y)))
        y = functional.silu(self.layer_norm(self.third(y.flatten(2).mT)))
        return self.last(y).float().square().sum()


@COMPILES
def test_norms_of_mixed_types_are_fused() -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        step = capture_call(Norms(), (torch.randn(4, 3, 4, 4),), {})[1]
    found = fuse(step, Kernels())
    assert not found.failures
    calls = [call for region in found.kernels for call in region.calls]
    values = in_channels_last(step).values
    mixed = {c.target for c in calls if len({values[v].fake.dtype for v in c.operands}) > 1}
    assert mixed >= {
        ATEN._native_batch_norm_legit_functional.default,
        ATEN.native_batch_norm_backward.default,
        ATEN.native_group_norm.default,
        ATEN.native_group_norm_backward.default,
        ATEN.native_layer_norm.default,
        ATEN.native_layer_norm_backward.default,
    }


@COMPILES
def test_sums_of_many_rows_are_as_exact_as_in_eager_mode() -> None:
    def sums(x: Tensor, half: Tensor) -> list[Tensor]:
        y = x * x
        return [
            y.flatten(0, 1).sum(0),
            y.sum((0, 1)),
            y.sum((1, 0), keepdim=True),
            y.transpose(0, 2).sum((1, 2)),
            y.mean((0, 1)),
            half.mean((0, 1), keepdim=True),
            half.sum((0, 1)),
            half.sum((0, 1), dtype=torch.float32),
            (y > 0.5).sum((0, 1)),
        ]

    x = torch.rand(64, 256, 4, generator=torch.Generator().manual_seed(0))
    given = [x, x.bfloat16()]
    got, expected = inductor.begin(sums, given)()([*given]), sums(*given)
    exact = sums(*(t.double() for t in given))
    exact[7] = exact[6]  # which is in float64, too
    for a, b, c in zip(got, expected, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        rounding = torch.finfo(torch.float32).eps
        own, theirs = (kernel._distance(t, c.double()) for t in (a, b))
        assert own <= 4 * max(rounding, theirs)


@COMPILES
def test_sums_of_an_open_number_of_rows_are_as_exact_as_in_eager_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sums(x: Tensor) -> list[Tensor]:
        y = x * x
        return [y.flatten(0, 1).sum(0), y.sum((0, 1)), y.sum((1, 0), keepdim=True), y.sum(1), y.mean((0, 1))]

    b, t = sympy.symbols("b t", positive=True, integer=True)
    opened = OpenSizes({b: 0, t: 1, 16 * t: 2}, (4, 1200, 19200))
    shape, stride = (TrackedSize(4, 0), TrackedSize(1200, 1), 16), (TrackedSize(19200, 2), 16, 1)
    x = torch.empty(4, 1200, 16)
    track(x, shape, stride)
    symbols = SizeSymbols(RegionSizes(opened, [*shape[:2], stride[0]]))
    tags, inner = list[str](), compat.compile_fx_inner
    monkeypatch.setattr(
        compat, "compile_fx_inner", lambda *given: tags.append(config.cache_key_tag) or inner(*given)
    )
    run, holds = inductor.begin(sums, [x], symbols)(), symbols.holds()
    # Inductor's cache looks at symbols only, but what it writes may depend on the sizes.
    assert tags == ["(4, 1200)"]
    assert not holds(1, 1200)
    for size in ((4, 1200), (3, 700), (70, 200)):
        assert holds(*size)
        given = torch.rand(*size, 16, generator=torch.Generator().manual_seed(0))
        for a, e, c in zip(run([*size, given]), sums(given), sums(given.double()), strict=True):
            assert (a.shape, a.stride()) == (e.shape, e.stride())
            rounding = torch.finfo(torch.float32).eps
            assert kernel._distance(a, c) <= 4 * max(rounding, kernel._distance(e, c))


@pytest.mark.parametrize(
    ("found", "exact", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 8.0], [3.0, 4.0], 0.8),
        ([-torch.inf, 2.0], [-torch.inf, 2.0], 0.0),
        ([torch.nan, 2.0], [torch.nan, 2.0], 0.0),
        ([torch.nan, 2.0], [1.0, 2.0], torch.inf),
        ([1.0, 2.0], [torch.nan, 2.0], torch.inf),
        ([torch.inf, 2.0], [1.0, 2.0], torch.inf),
        ([torch.inf, 2.0], [-torch.inf, 2.0], torch.inf),
    ],
)
def test_a_number_of_only_one_is_infinitely_far(
    found: list[float], exact: list[float], distance: float
) -> None:
    assert kernel._distance(torch.tensor(found), torch.tensor(exact, dtype=torch.float64)) == distance


def test_compilations_of_other_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(compat.AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    with inductor._without_waiting() as waits:
        compat.AsyncCompile.wait("compilers", "here")
        other = Thread(target=compat.AsyncCompile.wait, args=("compilers", "there"))
        other.start()
        other.join()
    assert (waited, len(waits)) == (["there"], 1)
    waits[0]()
    assert waited == ["there", "here"]
