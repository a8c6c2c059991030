"""The backward of a split loss runs in the forward half, with 1 as the loss's gradient, and is scaled later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_models import CASES, LOSSES, Decoder, captured, case, planned, split, tokens
from torch import Tensor, nn
from torch.nn import functional

from rematplan.runtime.graph.captured_step import CapturedStep, refs
from rematplan.runtime.split import split_step
from rematplan.runtime.split.early_backward import LINEAR, early_backward
from rematplan.runtime.split.regions import SplitRegion, StepUse
from rematplan.runtime.split.split_step import split_regions

ATEN = torch.ops.aten


class Norm(Decoder):
    """A head whose loss has a second term, of the scores' normaliser."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.token(tokens)).flatten(0, 1)
        return functional.cross_entropy(scores, targets.flatten()) + scores.logsumexp(-1).square().mean()


class Capped(Decoder):
    """A head whose scores are capped, and whose loss is scaled inside of the model."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = 30 * torch.tanh(self.head(self.token(tokens)).float().flatten(0, 1) / 30)
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum") / 7


class TwoHeads(Decoder):
    """Two heads. The gradient of the first loss is a number on the way to that of the second, which has two terms."""

    def __init__(self, smoothed_first: bool) -> None:
        super().__init__(tied=False)
        self.other = nn.Linear(self.head.in_features, self.head.out_features)
        self.smoothing = (0.1, 0.0) if smoothed_first else (0.0, 0.1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, targets = self.token(tokens).flatten(0, 1), targets.flatten()
        heads = zip((self.head, self.other), self.smoothing, strict=True)
        return 0.3 * sum(functional.cross_entropy(h(x), targets, label_smoothing=part) for h, part in heads)


class TwoTargets(Decoder):
    """A head with two cross entropies of the same scores."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.token(tokens)).flatten(0, 1)
        first, second = targets.flatten(), tokens.flatten()
        return functional.cross_entropy(scores, first, ignore_index=0) + 0.3 * functional.cross_entropy(
            scores, second
        )


def loss_region(step: CapturedStep, regions: tuple[SplitRegion, ...]) -> SplitRegion:
    return next(r for r in regions if "loss" in r.modules)


def split_loss(module: nn.Module, batch: tuple[Tensor, ...]) -> CapturedStep:
    step, regions = captured(module, batch)
    return split(step, [loss_region(step, regions)], 4)


def gradients(called: Any, module: nn.Module, batch: tuple[Tensor, ...], factor: float) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    (called(*batch) * factor).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_every_loss_of_a_head_is_early(name: str) -> None:
    _, _, step, regions = case(name)
    region = loss_region(step, regions)
    assert early_backward(StepUse(step), region) is not None
    made = split_regions(step, {region: 4})
    parts = {f"{c}.{k}" for c in region.calls for k in range(4)}
    assert not any(c.backward for c in made.calls if c.name in parts)


def test_scores_are_computed_once() -> None:
    """The forward has two products a part, and a third adds to the weight's gradient. None is left to the backward."""
    made = split_loss(Decoder(tied=False), tokens(2, 64))
    head = [c for c in made.calls if c.target in (ATEN.mm.default, ATEN.addmm.default) and c.module == "head"]
    assert len(head) == 12
    assert not any(c.backward for c in head)
    assert sum(c.backward and c.target is ATEN.mul.Tensor for c in made.calls) == 2


@pytest.mark.parametrize("kind", [Decoder, Capped, TwoTargets])
def test_the_factor_of_the_loss_scales_all_gradients(kind: type[Decoder]) -> None:
    torch.manual_seed(0)
    module, batch = kind(tied=False), tokens(2, 64)
    step, regions = captured(module, batch)
    head = loss_region(step, regions)
    assert early_backward(StepUse(step), head) is not None
    own = planned(module, split(step, [head], 4))
    for factor, power_of_two in ((1.0, True), (65536.0, True), (0.0, True), (0.1, False)):
        expected, found = gradients(module, module, batch, factor), gradients(own, module, batch, factor)
        exact = kind is Decoder and power_of_two
        for one, other in zip(expected[:-1], found[:-1], strict=True):
            assert torch.equal(one, other) or (not exact and (one - other).norm() < 3e-6 * one.norm())
        assert (expected[-1] - found[-1]).norm() <= 3e-6 * expected[-1].norm()


@pytest.mark.parametrize("name", LOSSES)
def test_the_factor_of_a_loss_of_elements_scales_all_gradients(name: str) -> None:
    module, batch, step, regions = case(name)
    own = planned(module, split(step, regions[:1], 4))
    for factor in (0.25, 3.0):
        expected, found = gradients(module, module, batch, factor), gradients(own, module, batch, factor)
        for (parameter, _), one, other in zip(module.named_parameters(), expected, found, strict=True):
            exact = factor != 3.0 and parameter.startswith("stem")
            assert torch.equal(one, other) or (not exact and (one - other).norm() < 3e-6 * one.norm())


@pytest.mark.parametrize("smoothed_first", [False, True])
def test_each_of_several_losses_has_its_own_factor(smoothed_first: bool) -> None:
    torch.manual_seed(0)
    module, batch = TwoHeads(smoothed_first), tokens(2, 64)
    step, regions = captured(module, batch)
    losses = [r for r in regions if early_backward(StepUse(step), r)]
    assert len(losses) == 2
    own = planned(module, split(step, losses, 4))
    expected, found = gradients(module, module, batch, 3.0), gradients(own, module, batch, 3.0)
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() < 3e-6 * one.norm()


def test_what_is_not_linear_in_one_number_or_is_in_half_precision_stays_in_the_backward() -> None:
    step, regions = captured(Norm(tied=False), tokens(2, 64))
    assert early_backward(StepUse(step), loss_region(step, regions)) is None
    half, regions = captured(Decoder(tied=False).half(), tokens(2, 64))
    assert early_backward(StepUse(half), loss_region(half, regions)) is None
    brain, regions = captured(Decoder(tied=False).bfloat16(), tokens(2, 64))
    assert early_backward(StepUse(brain), loss_region(brain, regions)) is not None


def test_no_op_is_linear_that_is_not() -> None:
    """Each op of the table, called with random operands: the result for a multiple is the multiple of the result."""
    torch.manual_seed(0)
    g, x, y = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    targets, count = torch.tensor([1, 5, 0, 2]), torch.tensor(4.0, dtype=torch.float64)
    image, kernel, pixels = (torch.randn(2, 6, n, n, dtype=torch.float64) for n in (3, 1, 3))
    kernel = (
        kernel.expand(6, 6, 1, 1) if kernel.shape[0] == 6 else torch.randn(6, 6, 1, 1, dtype=torch.float64)
    )
    half = [[0, 0], False, [0, 0], 1, [True, True, True]]
    calls = {
        ATEN.nll_loss_backward: lambda g: ATEN.nll_loss_backward(g[0, 0], x, targets, None, 1, -100, count),
        ATEN.nll_loss2d_backward: lambda g: ATEN.nll_loss2d_backward(
            g[0, 0], x.view(4, 6, 1, 1), targets.view(4, 1, 1), None, 1, -100, count
        ),
        ATEN._log_softmax_backward_data: lambda g: ATEN._log_softmax_backward_data(g, x, 1, x.dtype),
        ATEN._softmax_backward_data: lambda g: ATEN._softmax_backward_data(g, x, 1, x.dtype),
        ATEN.tanh_backward: lambda g: ATEN.tanh_backward(g, x),
        ATEN.sigmoid_backward: lambda g: ATEN.sigmoid_backward(g, x),
        ATEN.gelu_backward: lambda g: ATEN.gelu_backward(g, x),
        ATEN.silu_backward: lambda g: ATEN.silu_backward(g, x),
        ATEN.threshold_backward: lambda g: ATEN.threshold_backward(g, x, 0),
        ATEN.native_layer_norm_backward: lambda g: ATEN.native_layer_norm_backward(
            g, x, [6], x.mean(1, True), x.std(1, keepdim=True), y[0], y[1], [True, True, True]
        ),
        ATEN.convolution_backward: lambda g: ATEN.convolution_backward(
            g.sum() * image, pixels, kernel, [6], [1, 1], half[0], [1, 1], False, half[2], 1, [True] * 3
        ),
        ATEN.embedding_dense_backward: lambda g: ATEN.embedding_dense_backward(g, targets, 7, 2, False),
        ATEN.slice_backward: lambda g: ATEN.slice_backward(g, [8, 6], 0, 2, 6, 1),
        ATEN.mse_loss_backward: lambda g: ATEN.mse_loss_backward(g[0, 0], x, y, 1),
        ATEN.smooth_l1_loss_backward: lambda g: ATEN.smooth_l1_loss_backward(g[0, 0], x, y, 1, 0.5),
        ATEN.huber_loss_backward: lambda g: ATEN.huber_loss_backward(g[0, 0], x, y, 2, 0.5),
        ATEN.binary_cross_entropy_backward: lambda g: ATEN.binary_cross_entropy_backward(
            g[0, 0], x.sigmoid(), y.sigmoid()
        ),
        ATEN.leaky_relu_backward: lambda g: ATEN.leaky_relu_backward(g, x, 0.1, False),
        ATEN.upsample_bilinear2d_backward: lambda g: ATEN.upsample_bilinear2d_backward(
            g[None, None], [4, 6], [1, 1, 2, 3], False
        ),
        ATEN._to_copy: lambda g: ATEN._to_copy(g, dtype=torch.float64),
        ATEN.clone: ATEN.clone,
        ATEN.neg: ATEN.neg,
        ATEN.masked_fill.Scalar: lambda g: ATEN.masked_fill.Scalar(g, x > 0, 0.0),
        ATEN.sum: lambda g: ATEN.sum(g, [0]),
        ATEN.div.Tensor: lambda g: ATEN.div.Tensor(g, x),
        ATEN.div.Scalar: lambda g: ATEN.div.Scalar(g, 3),
        ATEN.mul: lambda g: ATEN.mul(x, g),
        ATEN.mm: lambda g: ATEN.mm(x.t(), g),
        ATEN.bmm: lambda g: ATEN.bmm(g[None], x.t()[None]),
        ATEN.add: lambda g: ATEN.add(g, 2 * g, alpha=3),
        ATEN.sub: lambda g: ATEN.sub(g, g * g.new_ones(())),
    }
    assert calls.keys() == LINEAR.keys()
    for op, call in calls.items():
        one, three = call(g), call(-3 * g)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (one, three)), strict=True):
            torch.testing.assert_close(-3 * a, b, msg=str(op))


def test_a_factor_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = Decoder(tied=False), tokens(2, 64)
    expected = gradients(module, module, batch, 3.0)
    gather = split_step._Splitter._gather

    def unscaled(self: Any, call: Any, value: str) -> None:
        gather(self, call, value)
        last = self.calls[-1]
        if last.target is ATEN.mul.Tensor and last.results == (value,):
            one = next(refs(last.args))
            self.calls[-1] = last.__class__(last.name, ATEN.clone.default, (one,), {}, last.results)

    monkeypatch.setattr(split_step._Splitter, "_gather", unscaled)
    found = gradients(planned(module, split_loss(module, batch)), module, batch, 3.0)
    assert all((a - b).norm() > 0.5 * a.norm() for a, b in zip(expected, found, strict=True))
