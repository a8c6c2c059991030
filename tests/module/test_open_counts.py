"""Laws of forwards that select elements by their values: one capture serves all numbers of selected elements, bit by
bit, and a forward that depends on such a number otherwise is captured anew."""

import copy
from collections.abc import Callable

import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn
from torch.nn import functional as F

import rematplan

BATCH, LENGTH, WIDTH = 4, 12, 8


def masked(chosen: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and labels of which ``chosen`` are not ignored."""
    draw = torch.Generator().manual_seed(100 * length + chosen)
    labels = torch.full((BATCH * length,), -100)
    labels[torch.randperm(BATCH * length, generator=draw)[:chosen]] = 3
    return torch.randn(BATCH, length, WIDTH, generator=draw), labels.view(BATCH, length)


class Selecting(nn.Module):
    """A body and a head that has the outputs which ``choose`` selects."""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, WIDTH))
        self.head, self.choose = nn.Linear(WIDTH, 5), choose
        self.register_buffer("weights", torch.linspace(0.5, 2, LENGTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.choose(self.head(self.body(x)), labels)


def of_labels(h: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return F.cross_entropy(h[kept], labels[kept])


def by_select(h: Tensor, labels: Tensor) -> Tensor:
    return h.masked_select((labels != -100)[..., None]).tanh().sum()


def repeated(h: Tensor, labels: Tensor) -> Tensor:
    often = (labels != -100).sum(1)
    return h.mean(1).repeat_interleave(often, 0).square().mean()


def two_counts(h: Tensor, labels: Tensor) -> Tensor:
    kept, other = labels != -100, labels == -100
    return h[kept].square().mean() + h[other].abs().sum()


def of_selected(h: Tensor, labels: Tensor) -> Tensor:
    kept = labels.flatten()[labels.flatten() != -100]  # then those of them that are 3
    return h.flatten(0, 1)[: len(kept)][kept == 3].square().sum()


def aligned(h: Tensor, labels: Tensor) -> Tensor:
    wanted = torch.arange(labels.shape[1], device=h.device) % 2 + 3
    lengths = torch.full((len(h),), h.shape[1]), (labels != -100).sum(1).clamp(2, 5)
    steps = h.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(steps, wanted.expand_as(labels), *lengths, zero_infinity=True)


def planned(choose: Callable[[Tensor, Tensor], Tensor], *first: Tensor) -> tuple[nn.Module, nn.Module]:
    plain = Selecting(choose)
    made = rematplan.plan_module(
        copy.deepcopy(plain), first, budget="1GiB", strategy="store_all", costs="roofline", loss_memory="1x"
    )
    return made, plain


def loss(*batch: Tensor) -> Callable[[nn.Module], list[Tensor]]:
    def use(model: nn.Module) -> list[Tensor]:
        for p in model.parameters():
            p.grad = None
        result = model(*batch)
        result.backward()
        return [result.detach()]

    return use


@pytest.mark.parametrize("choose", [repeated, two_counts, of_selected], ids=lambda f: f.__name__)
def test_one_capture_serves_all_counts(choose: Callable[[Tensor, Tensor], Tensor]) -> None:
    ours, plain = planned(choose, *masked(20))
    for chosen in (20, 17, 30, 2, 17):
        equal_after(loss(*masked(chosen)), ours, plain)
    stats = rematplan.planning(ours).stats()
    assert (stats.captures, stats.open_captures) == (1, 1)


@pytest.mark.parametrize("limit", [10.0, 1.0])  # of 1 s, nothing is left for a search in the background
def test_the_plan_of_another_number_is_used_without_its_step(limit: float) -> None:
    plain, auto = Selecting(of_labels), rematplan.Auto(time_limit=limit)
    ours = rematplan.plan_module(
        copy.deepcopy(plain), masked(20), budget="1GiB", costs="roofline", strategy=auto
    )
    for chosen in (20, 21, 22, 23, 18, 27):
        equal_after(loss(*masked(chosen)), ours, plain)
    stats = rematplan.planning(ours).stats()
    assert (stats.captures, stats.open_captures, stats.carried) == (1, 1, 4)


class Moving(Selecting):
    """Makes a list of its anchors again in each call, as detectors do that move them to the batch's device."""

    def __init__(self) -> None:
        super().__init__(of_labels)
        self.anchors = [torch.linspace(-1, 1, WIDTH), torch.ones(WIDTH)]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.anchors = [one.to(x.dtype) for one in self.anchors]
        return super().forward(x * self.anchors[0] + self.anchors[1], labels)


def test_state_that_is_set_to_what_it_was_is_served_by_one_capture() -> None:
    plain = Moving()
    ours = rematplan.plan_module(
        copy.deepcopy(plain), masked(20), budget="1GiB", strategy="store_all", costs="roofline"
    )
    for chosen in (20, 17, 30):
        equal_after(loss(*masked(chosen)), ours, plain)
    stats = rematplan.planning(ours).stats()
    assert (stats.captures, stats.open_captures) == (1, 1)
    for one in (ours, plain):
        one.anchors[0] = torch.full((WIDTH,), 0.5)
    equal_after(loss(*masked(17)), ours, plain)


@pytest.mark.parametrize("choose", [of_labels, aligned], ids=lambda f: f.__name__)
def test_one_capture_serves_all_counts_and_lengths(choose: Callable[[Tensor, Tensor], Tensor]) -> None:
    ours, plain = planned(choose, *masked(20))
    for chosen, length in ((20, 12), (17, 9), (30, 14), (5, 12), (40, 20)):
        equal_after(loss(*masked(chosen, length)), ours, plain)
    stats = rematplan.planning(ours).stats()
    assert (stats.captures, stats.open_captures) == (1, 1)


def test_counts_of_zero_one_and_all_have_the_same_bits() -> None:
    ours, plain = planned(by_select, *masked(20))
    for chosen in (20, 0, 1, 48, 19, 0):
        equal_after(loss(*masked(chosen)), ours, plain)


def by_size(h: Tensor, labels: Tensor) -> Tensor:
    kept = h[labels != -100]
    return kept.sum() if len(kept) > 15 else kept.square().sum()


def divided(h: Tensor, labels: Tensor) -> Tensor:
    kept = h[labels != -100]
    return kept.square().sum() / len(kept)


def counted_on(h: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -100).flatten()
    numbers = torch.arange(len(kept[kept]))  # a recorded call with the count among its arguments
    return h.flatten(0, 1)[numbers[numbers % 3 == 0]].square().sum()


def by_value(h: Tensor, labels: Tensor) -> Tensor:
    kept = h[labels != -100]
    return kept.sum() if (labels != -100)[0].any() else kept.square().sum()


@pytest.mark.parametrize("choose", [by_size, divided, counted_on, by_value], ids=lambda f: f.__name__)
def test_a_forward_that_depends_on_counts_otherwise_has_the_same_bits(
    choose: Callable[[Tensor, Tensor], Tensor],
) -> None:
    ours, plain = planned(choose, *masked(20))
    x, labels = masked(14)
    labels[0] = -100
    for batch in (masked(20), masked(17), masked(9), (x, labels), masked(12)):
        equal_after(loss(*batch), ours, plain)


def test_counts_that_a_buffer_decides_follow_the_buffer() -> None:
    class Thresholded(Selecting):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.head(self.body(x))[:, self.weights > 1].square().mean()

    plain = Thresholded(of_labels)
    ours = rematplan.plan_module(
        copy.deepcopy(plain), masked(20), budget="1GiB", strategy="store_all", costs="roofline"
    )
    for scale in (1.0, 1.3, 0.7, 1.3):
        for model in (ours, plain):
            model.weights.copy_(scale * torch.linspace(0.5, 2, LENGTH))
        equal_after(loss(*masked(20)), ours, plain)
    assert rematplan.planning(ours).stats().captures == 1


def test_a_larger_count_stays_within_the_budget() -> None:
    plain = Selecting(of_labels)
    ours = rematplan.plan_module(
        copy.deepcopy(plain), masked(40), budget="100%", strategy="approx_dp", costs="roofline"
    )
    for chosen in (40, 12, 30):
        equal_after(loss(*masked(chosen)), ours, plain)
        assert ours.plan.peak <= ours.plan.budget
