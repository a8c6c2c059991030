"""Laws of forwards that decide by the values of their inputs: a plan is used where the forward would decide alike."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

import rematplan
from rematplan.ir import ModelError
from rematplan.module.plan_access import runner_of
from rematplan.module.verification import same_bits

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[["Deciding", Tensor, Tensor], Tensor]


class Deciding(nn.Module):
    """What it makes of ``y``, a linear layer's result, depends on ``mask``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body
        self.register_buffer("calls", torch.tensor(0))
        self.recurrent = nn.GRU(8, 8)
        self.table = torch.arange(3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.body(self, self.linear(x), mask)


def branch(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh() if mask.all() else y * mask[:, None]


def checked(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    if mask.sum() == 2:
        raise ValueError("two")
    return y.tanh()


def picked(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh()[mask.bool()].sin() / mask.sum().item()


def assigned(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """The rows that a mask picks are given others; the backward picks the gradients of these."""
    other = 2 * y
    other[mask.bool()] = y[0].sin() + y[mask.bool()]
    return other


def selected(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.masked_select(mask.bool()[:, None]).exp()


def repeated(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.repeat_interleave(mask + 1, 0).tanh()


def listed(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    sizes = (mask + 1).tolist()
    return torch.cat([part.softmax(0) for part in y.repeat(3, 1)[: sum(sizes)].split(sizes)])


def written(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """What is decided by is changed in place first, through a view."""
    mask = mask.clone()
    mask[1:].view(-1)[:2] = 0
    return y.tanh() if mask.any() else y.sin()


def counted(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """It decides by a buffer and then changes it, and by a plain tensor."""
    early = model.calls < 2
    model.calls += 1
    return y.tanh() if early and (mask[:3] == model.table).sum() < 3 else y.sin()


def aligned(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """CTC loss, whose forward leaves its backward a table as wide as the longest target."""
    steps = y.repeat(3, 1).view(9, 2, 8).log_softmax(-1)
    rows = torch.tensor([[1, 2, 3, 2], [3, 1, 3, 1]])
    lengths = mask[4:] + 8, mask[1:3] + 1
    joined = rows[torch.arange(4) < lengths[1][:, None]]
    return sum(F.ctc_loss(steps, targets, *lengths, zero_infinity=True) for targets in (rows, joined))


def signed(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """0 and −0 are equal, but not the same to decide by."""
    return y * (mask[1] - 0.5).sign().mul(0.0).item()


def shortcut(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """As attention looks for a mask of ones: not while it is compiled."""
    return (
        y.tanh()
        if not torch.compiler.is_compiling() and mask.all()
        else y.tanh() * mask[:, None].float().exp()
    )


def picked_one(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y[0, 0].masked_select(mask.all()).sum() + y.sum()


def aligned_by_numbers(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    steps = y.repeat(3, 1).view(9, 2, 8).log_softmax(-1)
    of = steps, torch.tensor([1, 2, 3, 2, 3]), (9, 8), (3, 2)
    return (F.ctc_loss(*of, reduction="sum") + F.ctc_loss(*of)) * mask[0]


def seen_by_numpy(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh() * float(np.asarray(mask + 1)[1:3].sum())


def counted_by_kind(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """Of how many kinds the marks are, and how many there are of each."""
    kinds, places, counts = mask.unique(return_inverse=True, return_counts=True)
    runs = mask.view(3, 2).unique_consecutive(dim=0)
    weighed = mask.bincount(torch.linspace(0, 1, 6), 2)
    return y[: len(kinds)].exp() * (kinds * counts)[places].sum() + weighed.cos().sum() + runs.sin().sum()


def packed(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """Six sequences of one to three steps."""
    steps = y * torch.linspace(-1, 1, 3)[:, None, None]
    sequences = rnn.pack_padded_sequence(steps, mask + 1, enforce_sorted=False)
    states, last = model.recurrent(sequences)
    padded, lengths = rnn.pad_packed_sequence(states, batch_first=True, padding_value=0.5, total_length=4)
    return torch.cat([padded[0], last[:, 0], y * lengths[:, None]])


def listed_as_tensor(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """Lists of 0-d tensors become a tensor: of an input, of activations, and of both with numbers."""
    longest = torch.tensor([row.max() + 1 for row in mask.view(3, 2)])
    means = torch.as_tensor([y.mean().detach(), y.detach().max()])
    both = torch.tensor([[y.detach().sum(), 1], [2.5, mask[0]]], dtype=torch.float64)
    mixed = torch.tensor([mask[1], 0.5, True])
    assert (longest.dtype, means.dtype, mixed.dtype) == (torch.int64, torch.float32, torch.float32)
    return (y[:3] * longest[:, None] * means.sum()).tanh() * both.cos().mean() + mixed.sum()


def rewritten(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """It reads the same number twice, and changes it in between."""
    mask = mask.clone()
    first = int(mask[0])
    mask[0] += mask[1]
    return y.tanh() * (first + int(mask[0]))


def never_dropped(_: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    """As layers are dropped at a rate, here of 0; what is drawn for it is drawn all the same."""
    return y if torch.rand([]) < 0.0 else y.tanh() * torch.rand(())


BODIES = {
    body.__name__: body
    for body in (
        branch,
        checked,
        picked,
        shortcut,
        picked_one,
        assigned,
        selected,
        repeated,
        listed,
        written,
        rewritten,
        counted,
        signed,
        aligned,
        aligned_by_numbers,
        seen_by_numpy,
        counted_by_kind,
        packed,
        listed_as_tensor,
        never_dropped,
    )
}
MASKS = [
    torch.tensor(bits)
    for bits in (
        [1, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1],
        [0, 1, 2, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    )
]


def planned_and_plain(body: Body, **options: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Deciding(body)
    plain = copy.deepcopy(model)
    how = {"budget": "1GiB", "strategy": "store_all", "costs": "roofline", **options}
    return rematplan.plan_module(model, (X, MASKS[0]), **how), plain


def leaves(model: nn.Module, mask: Tensor) -> list[Tensor]:
    """Outputs, gradients and buffers after a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    given = mask.clone()
    y = model(X, given)
    y.square().sum().backward()
    assert torch.equal(given, mask)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *model.buffers()]


@pytest.mark.parametrize("name", BODIES)
def test_every_mask_has_eager_mode_s_bits(name: str) -> None:
    planned, plain = planned_and_plain(BODIES[name])
    for mask in (*MASKS, *MASKS):
        found, expected = leaves(planned, mask), leaves(plain, mask)
        assert len(found) == len(expected)
        assert all(map(same_bits, found, expected))
    assert 1 <= len(planned.plans) <= len(MASKS)


def test_a_plan_is_for_all_inputs_that_are_decided_alike() -> None:
    planned, _ = planned_and_plain(branch)
    for mask, plans in zip(MASKS, (1, 2, 2, 2, 2), strict=True):
        planned(X, mask)
        assert len(planned.plans) == plans
    planned, _ = planned_and_plain(branch, dynamic_shapes=False)
    with pytest.raises(ModelError, match="attributes or decisions"):
        planned(X, MASKS[1])


def test_a_check_that_fails_later_raises_its_error() -> None:
    planned, _ = planned_and_plain(checked)
    with pytest.raises(ValueError, match="two"):
        planned(X, torch.tensor([1, 1, 0, 0, 0, 0]))
    planned(X, MASKS[1])
    assert len(planned.plans) == 1


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, np.asarray])
def test_a_plain_tensor_that_is_changed_in_place_is_looked_at_again(read: Callable[[Tensor], list]) -> None:
    planned, plain = planned_and_plain(lambda model, y, mask: y.tanh() * float(read(model.table)[1]))
    for added in (0, 5, 0):
        planned.table.add_(added)
        plain.table.add_(added)
        assert all(map(same_bits, leaves(planned, MASKS[0]), leaves(plain, MASKS[0])))
    assert len(planned.plans) == 2


def reread(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    for _ in range(5):
        y = y.tanh() * model.table.tolist()[1] * int(mask[2])
    return y


def test_a_guard_looks_once_at_what_a_forward_reads_several_times() -> None:
    planned, plain = planned_and_plain(reread)
    assert all(map(same_bits, leaves(planned, MASKS[0]), leaves(plain, MASKS[0])))
    (entry,) = runner_of(planned).plans.all()
    assert len(entry.guard.decided.entries) == 3  # the list, the element of the mask and its number


def test_sequences_may_be_packed_before() -> None:
    torch.manual_seed(0)
    plain = nn.GRU(8, 8)
    planned = rematplan.plan_module(
        copy.deepcopy(plain), (rnn.pack_sequence([X[:4], X[3:]]),), budget="1GiB", costs="roofline"
    )
    for lengths in (4, 3), (5, 1):
        given = rnn.pack_sequence([X[:n] for n in lengths])
        for model in (planned, plain):
            model.zero_grad()
            model(given)[0].data.square().sum().backward()
        found, expected = (
            [model(given)[0].data, *(p.grad for p in model.parameters())] for model in (planned, plain)
        )
        assert all(map(same_bits, found, expected))
    assert len(planned.plans) == 2


def by_parameter(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y.tanh() if (mask[:, None] * y).sum() > 0 else y


def by_what_was_written(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    kept = mask.clone()
    seen = kept.view(2, 3)
    kept[:2] = y.argmax(1)[:2]
    return y.tanh() if seen.any() else y


def by_numpy(model: Deciding, y: Tensor, mask: Tensor) -> Tensor:
    return y * float(y.detach().numpy()[0, 0])


@pytest.mark.parametrize("body", [by_parameter, by_what_was_written, by_numpy])
def test_what_no_input_decides_has_no_plan(body: Body) -> None:
    with pytest.warns(UserWarning, match="reads values of tensors"):
        planned_and_plain(body)
