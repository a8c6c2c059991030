"""Laws of captures with open sizes: for each shape that its guard accepts, an instance is the step that is captured for
that shape by itself, and a planned module follows eager mode bit by bit; what depends on a size is captured by itself.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_models import WIDTH, Of, mlp, sequence, step_of
from same_bits import equal_after, planned_and_plain
from torch import Tensor, nn
from torch.nn import functional as F

import rematplan
from rematplan.module.matching_names import names_of
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.joint_trace import TraceRequest, trace_joint_graph
from rematplan.runtime.capture.patches.fake_layouts import check_layouts
from rematplan.runtime.capture.read_fx import finished
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.symbols.expressions import NotSymbolic
from rematplan.runtime.symbols.full_slices import without_full_slices
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols
from rematplan.runtime.symbols.symbolic_step import OpenStep

pytestmark = pytest.mark.usefixtures("same_draws")


def attention(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Attention of one head, masked, with dropout."""
    q = x * model.w
    scores = (q @ x.transpose(1, 2) / 8).masked_fill(~mask[:, None], -1e9)
    return F.dropout(scores.softmax(-1), 0.2) @ q


def images() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, WIDTH, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(WIDTH, 4, 3))


def masked(b: int, t: int) -> tuple[Tensor, ...]:
    return torch.randn(b, t, WIDTH), torch.arange(t).expand(b, t) <= t // 2


def pictures(b: int, t: int) -> tuple[Tensor, ...]:
    return (torch.randn(b, 3, t + 3, 2 * t + 2),)


def _conv(channels: int = 3) -> nn.Module:
    return nn.Conv2d(channels, 4, 3, padding=1)


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Images of another size and back, by linear and by cubic interpolation."""
    small = F.interpolate(x.relu(), size=(7, 9), mode="bilinear") * 0.5
    again = F.interpolate(small, size=size, mode="bicubic") + F.interpolate(x, size=size, mode="bilinear")
    rows = F.interpolate(again.mean(3), size=size[1], mode="linear")
    return again + rows[:, :, None]


def overwritten(model: Any, x: Tensor) -> Tensor:
    """Half of the features are those of the input."""
    y, half = x * model.w, x.shape[1] // 2
    y[:, :half] = x[:, :half]
    return y


def shifted(model: Any, x: Tensor) -> Tensor:
    """Each place has the features of the place before, scaled; new ones at three places."""
    y = x * model.w
    z = torch.zeros_like(y)
    z[..., 1:, :] = y[:, :-1]
    z[:, 0, None, :3] = 1.0
    z[:, :, 2] += 0.5
    return z.relu()


Inputs = Callable[[int, int], tuple[Tensor, ...]]


def one_head(m: Of, x: Tensor) -> Tensor:
    """A view to the same sizes, of which one is 1: its stride becomes that of a new tensor."""
    heads = (x * m.w).unflatten(-1, (1, -1)).transpose(1, 2)
    return heads.view(len(x), -1, x.shape[1], x.shape[2]).tanh()


OPEN: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "mlp": (mlp, sequence),
    "images": (images, pictures),
    "channels last": (images, lambda b, t: (pictures(b, t)[0].to(memory_format=torch.channels_last),)),
    "attention": (lambda: Of(attention), masked),
    "fused attention": (
        lambda: Of(lambda m, x: F.scaled_dot_product_attention(x * m.w, x, x, is_causal=True)),
        sequence,
    ),
    "a mean": (lambda: Of(lambda m, x: (x * m.w).mean((0, 1))), sequence),
    "a full slice": (lambda: Of(lambda m, x: (x * m.w)[:, : x.shape[1]].relu()[:].sum(1)), sequence),
    "a slice that is full at times": (lambda: Of(lambda m, x: (x * m.w)[:, :4].sum(1)), sequence),
    "the last ones": (lambda: Of(lambda m, x: (x * m.w)[:, -2:, None].sum(1)), sequence),
    "permuted": (
        lambda: Of(lambda m, x: m.parts[0]((x * m.w).transpose(0, 1)).sum(0), nn.LayerNorm(WIDTH)),
        sequence,
    ),
    "permuted draws": (lambda: Of(lambda m, x: F.dropout((x * m.w).mT, 0.15).sum(-1)), sequence),
    "in place": (lambda: Of(lambda m, x: (x * m.w).add_(x).mul_(2).relu_()), sequence),
    "positions": (
        lambda: Of(lambda m, x: (x * m.w) + torch.arange(x.shape[1])[:, None] / x.shape[1]),
        sequence,
    ),
    "a decided mask": (
        lambda: Of(lambda m, x, k: (x * m.w).masked_fill(k[..., None], 0.0) if k.any() else (x * m.w).tanh()),
        masked,
    ),
    "enlarged": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 2, 3)
        ),
        lambda rows, size: pictures(max(rows, 1), size),  # PyTorch 2.14 cannot trace it for no rows
    ),
    "interpolated channels last": (
        lambda: Of(lambda m, x: m.parts[1](_resized(m.parts[0](x), x.shape[2:])), *(_conv(), _conv(4))),
        # PyTorch's forward refuses no rows
        lambda b, t: (pictures(max(b, 1), t)[0].to(memory_format=torch.channels_last),),
    ),
    "all pairs": (lambda: Of(lambda m, x: (x @ x.transpose(-1, -2)).softmax(-1) @ (x * m.w)), sequence),
    "padded": (lambda: Of(lambda m, x: F.pad(x * m.w, (0, 0, 0, -x.shape[1] % 4)).sum(1)), sequence),
    "padded where transposed": (  # not padded, its copy is transposed, too
        lambda: Of(lambda m, x: F.pad((x * m.w).mT, (0, -x.shape[1] % 4)).tanh().sum(1)),
        sequence,
    ),
    "a part overwritten": (lambda: Of(overwritten), sequence),
    "a length by len": (lambda: Of(lambda m, x: m.w.expand(len(x), -1) * x.sum(1) / len(x)), sequence),
    "shifted in place": (lambda: Of(shifted), sequence),
    "transposed features": (
        lambda: Of(lambda m, x: m.parts[0]((x * m.w).mT).mT.relu(), nn.Conv1d(WIDTH, 4, 3, padding=1)),
        sequence,
    ),
    "repeated outputs": (lambda: Of(lambda m, x: (x * m.w).sum(1, keepdim=True).expand_as(x)), sequence),
    "a branch": (lambda: Of(lambda m, x: (x * m.w).relu() if x.shape[1] > 5 else (x * m.w).tanh()), sequence),
}
"""Models that capture with open sizes, with batches for two sizes."""


FIXED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a root": (
        lambda: Of(lambda m, x: (x * m.w) / math.sqrt(x.shape[1])),
        r"1 of argument 0 \(\d+, line \d+ of test_open_shapes.py\)",
    ),
    "a loop": (
        lambda: Of(lambda m, x: sum((x[:, t] * m.w).tanh() for t in range(x.shape[1]))),
        "1 of argument 0",
    ),
    "a tensor of a size": (lambda: Of(lambda m, x: (x * m.w) * torch.tensor(x.shape[1])), "1 of argument 0"),
    "a number that rounds": (lambda: Of(lambda m, x: (x * m.w) * x.shape[1] ** -0.5), "not an integer"),
    "a size that may round": (
        lambda: Of(lambda m, x: (x * m.w)[:, : int(x.shape[1] * 0.3 + 1)]),
        "may round|1 of argument 0",
    ),
    "recurrent": (lambda: Of(lambda m, x: m.parts[0](x)[0], nn.LSTM(WIDTH, WIDTH)), r"nn.LSTM \(line \d+ of"),
    "a look-up": (lambda: Of(lambda m, x: (x * m.w) * {6: 2, 7: 3, 8: 4, 9: 5}[x.shape[1]]), "a dictionary"),
    "NumPy": (lambda: Of(lambda m, x: (x * m.w) / float(np.log(x.shape[1]))), "NumPy"),
}
"""Models of which some size has to be known, and what the stats say of it."""


def opened(model: nn.Module, batch: tuple[Tensor, ...]) -> OpenStep:
    symbols, decisions = BatchSymbols(), ValueGuardRecorder(dict(model.named_buffers()), batch)
    traced = trace_joint_graph(TraceRequest(model, batch, "step", model, decisions, symbols))
    assert traced.table
    return OpenStep.of(traced.step, symbols, traced.table)


@pytest.mark.parametrize("name", OPEN)
def test_an_instance_is_what_its_shape_gives_by_itself(name: str) -> None:
    make, inputs = OPEN[name]
    model, accepted = make(), 0
    step = opened(model, inputs(3, 6))
    for sizes in ((2, 9), (WIDTH, WIDTH), (4, 3)):
        batch = inputs(*sizes)
        if not step.guard.holds(batch):
            continue
        accepted += 1
        try:
            instance = finished(without_full_slices(step.at(batch, step.sizes(batch))))
            check_layouts(instance)
        except NotSymbolic:
            continue
        decisions = ValueGuardRecorder(dict(model.named_buffers()), batch)
        alone = capture(model, batch, "step", model, decisions)
        assert names_of(instance, alone) is not None, sizes
        assert sorted(instance.storage_bytes.values()) == sorted(alone.storage_bytes.values())
    assert accepted >= 2


def test_a_view_with_a_size_of_one_has_its_kernel_s_strides() -> None:
    planned, plain = planned_and_plain(Of(one_head), *sequence(3, 6))
    for sizes in ((3, 6), (2, 7), (3, 8), (2, 9)):
        batch = sequence(*sizes)
        results = [one(*batch) for one in (planned, plain)]
        assert torch.equal(*results)
        assert results[0].stride() == results[1].stride()
        results[0].sum().backward()
    assert rematplan.planning(planned).stats().captures == 1


@pytest.mark.parametrize("name", FIXED)
def test_what_depends_on_a_size_is_captured_by_itself_and_says_why(name: str) -> None:
    make, reason = FIXED[name]
    planned, plain = planned_and_plain(make(), *sequence(3, 6))
    for sizes in ((3, 6), (2, 7), (3, 8), (3, 6)):
        batch = sequence(*sizes)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    stats = rematplan.planning(planned).stats()
    assert stats.captures + stats.instances == 3
    assert any(_found(reason, one) for one in stats.reasons), stats.reasons


@pytest.mark.parametrize("name", ["a number that rounds", "a size that may round"])
def test_where_some_size_cannot_be_symbolic_those_that_vary_are(name: str) -> None:
    planned, plain = planned_and_plain(FIXED[name][0](), *sequence(3, 6))
    for sizes in ((3, 6), (2, 6), (5, 6), (4, 6), (4, 9), (2, 9), (7, 6)):
        batch = sequence(*sizes)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures, stats.instances) == (3, 1, 4)


def _found(reason: str, text: str) -> bool:
    return any(re.search(part, text) for part in reason.split("|"))


SIZES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from((1, 2, 3, 6, WIDTH, 11))), min_size=3, max_size=5
)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(OPEN)), SIZES, st.booleans())
def test_each_shape_follows_eager_mode(name: str, shapes: list[tuple[int, int]], training: bool) -> None:
    make, inputs = OPEN[name]
    try:
        shapes = [s for s in shapes if make().train(training)(*inputs(*s)).sum().isfinite()] or [(2, 6)]
    except (RuntimeError, ValueError, IndexError):  # sizes that the model refuses
        return
    planned, plain = planned_and_plain(make().train(training), *inputs(*shapes[0]))
    for sizes in (*shapes, shapes[0]):
        batch = inputs(*sizes)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)


def test_the_features_of_a_recurrent_layer_are_served_for_each_number_of_samples() -> None:
    model = Of(lambda m, x: m.parts[0](x * m.w)[0], nn.GRU(WIDTH, WIDTH, batch_first=True))
    planned, plain = planned_and_plain(model, *sequence(2, 3))
    for rows in (4, 3, 5):
        batch = sequence(rows, 3)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    assert rematplan.planning(planned).stats().captures == 1


def test_the_expanded_gradient_of_a_loss_of_one_feature_has_the_strides_of_a_number() -> None:
    model = Of(lambda m, x: m.parts[0](x * m.w).flatten(0, 1).square().mean(), nn.Linear(WIDTH, 1))
    planned, plain = planned_and_plain(model, *sequence(2, 3))
    for rows in (4, 4, 3, 3, 5, 5):
        batch = sequence(rows, 3)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    stats = rematplan.planning(planned).stats()
    assert (stats.open_captures, stats.reasons) == (1, ())


def test_a_gradient_that_nothing_needs_has_no_layout_to_check() -> None:
    parts = nn.Conv2d(1, 8, 4, 4), nn.LayerNorm(8)
    model = Of(lambda m, x: m.parts[1](m.parts[0](x).flatten(2).mT) * m.w[:1], *parts)
    planned, plain = planned_and_plain(model, torch.randn(2, 1, 16, 16))
    for samples, side in ((3, 16), (4, 24)):
        batch = (torch.randn(samples, 1, side, side),)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    assert rematplan.planning(planned).stats().open_captures == 1


def test_sizes_that_the_model_refuses_do_not_end_captures_with_open_sizes() -> None:
    model = Of(lambda m, x: m.parts[0]((x * m.w).mT), nn.InstanceNorm1d(WIDTH))
    planned, plain = planned_and_plain(model, *sequence(4, 6))
    with pytest.raises(ValueError, match="spatial"):
        planned(*sequence(4, 1))
    for sizes in ((4, 5), (3, 4)):
        batch = sequence(*sizes)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    assert rematplan.planning(planned).stats().reasons == ()


def test_sizes_that_are_equal_by_accident_stay_apart() -> None:
    """The second shape, with which sizes are opened, has one number for all its sizes."""
    planned, plain = planned_and_plain(OPEN["all pairs"][0](), *sequence(2, 5))
    for sizes in ((WIDTH, WIDTH), (3, WIDTH), (WIDTH, 3), (4, 6)):
        batch = sequence(*sizes)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures, stats.instances, stats.reasons) == (1, 1, 4, ())


def test_parts_of_larger_tensors_are_served_and_shared_memory_is_not() -> None:
    planned, plain = planned_and_plain(
        Of(lambda m, x, y: (x * m.w + y).relu()), *sequence(2, 5), *sequence(2, 5)
    )
    data = torch.randn(40, 5, WIDTH)
    for batch in ((data[3:6], data[6:9].clone()), (data[30:34], data[:4].clone()), (data[:6], data[10:16])):
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
    assert "share" in rematplan.planning(planned).stats().reasons[0]


def test_what_a_forward_returns_in_addition_to_tensors_is_of_the_present_sizes() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        return {"y": (x * model.w).sum(1), "length": x.shape[1], "shape": x.shape, "double": 2 * x.shape[0]}

    planned, plain = planned_and_plain(Of(forward), *sequence(2, 5))
    for sizes in ((3, 6), (4, 7)):
        batch = sequence(*sizes)
        ours, theirs = planned(*batch), plain(*batch)
        assert torch.equal(ours.pop("y"), theirs.pop("y"))
        assert ours == theirs
        assert type(ours["length"]) is int
        assert type(ours["shape"]) is torch.Size


def test_a_decision_by_values_is_taken_anew_at_each_shape() -> None:
    planned, plain = planned_and_plain(OPEN["a decided mask"][0](), *masked(2, 5))
    for sizes, all_false in (
        ((3, 6), False),
        ((4, 7), False),
        ((3, 9), True),
        ((5, 9), False),
        ((2, 8), True),
    ):
        x, mask = masked(*sizes)
        batch = x, mask & (not all_false)
        equal_after(lambda model, batch=batch: step_of(model, batch), planned, plain)
