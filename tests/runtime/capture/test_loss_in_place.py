"""Laws of cross entropies whose gradient is computed in one tensor of the scores' size: the same bits, less memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rematplan
from rematplan.runtime.capture.loss_in_place import CrossEntropyBackward
from rematplan.runtime.costs.measure import peak_above_entry

CLASSES, ROWS = 300, 64


class Scoring(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.loss, self.score = loss, nn.Linear(16, CLASSES, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x)
        return self.loss(scores), scores


GIVEN = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(2))
LABELS = GIVEN.masked_fill(GIVEN % 7 == 0, -100)


def labels(*shape: int) -> Tensor:
    return LABELS.view(shape)


WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "rows": (lambda y: functional.cross_entropy(y, labels(ROWS)), True),
    "a sum": (lambda y: functional.cross_entropy(y, labels(ROWS), reduction="sum"), True),
    "one each": (lambda y: functional.cross_entropy(y, labels(ROWS), reduction="none").square().mean(), True),
    "weighted": (lambda y: functional.cross_entropy(y, labels(ROWS), WEIGHT.to(y.dtype)), True),
    "in float": (lambda y: functional.cross_entropy(y.float(), labels(ROWS)), True),
    "classes second": (
        lambda y: functional.cross_entropy(y.T.reshape(4, CLASSES, 16), labels(4, 16)),
        False,  # a view stands between the two
    ),
    "pixels": (lambda y: functional.cross_entropy(y.reshape(1, CLASSES, 8, 8), labels(1, 8, 8)), True),
    "smoothed": (lambda y: functional.cross_entropy(y, labels(ROWS), label_smoothing=0.1), False),
    "penalised": (
        lambda y: functional.nll_loss(logs := y.log_softmax(1), labels(ROWS)) + logs.square().mean(),
        False,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LOSSES)
def test_bits_are_those_of_two_tensors(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    loss, in_place = LOSSES[kind]
    model, x = Scoring(loss, dtype), torch.randn(ROWS, 16, dtype=dtype)
    planned = rematplan.plan_module(
        copy.deepcopy(model), (x,), budget="100%", strategy="store_all", costs="roofline"
    )
    targets = [c.target for c in planned._rematplan.last.compiled.step.calls]
    assert any(isinstance(t, CrossEntropyBackward) for t in targets) == in_place
    for one in (planned, model):
        (3 * one(x)[0]).backward()
    assert torch.equal(planned.score.weight.grad, model.score.weight.grad)
    assert torch.equal(planned.score.bias.grad, model.score.bias.grad)


def test_a_step_holds_one_tensor_of_the_scores_size_fewer() -> None:
    """Than eager mode, where the caller keeps the scores; and no more than where it does not."""
    torch.manual_seed(0)
    model = Scoring(LOSSES["rows"][0], torch.float32)
    x, cpu = torch.randn(ROWS, 16), torch.device("cpu")
    planned = rematplan.plan_module(copy.deepcopy(model), (x,), budget="100%", strategy="store_all")
    peaks = []
    for one in (planned, model):
        for _ in range(2):
            one.zero_grad(set_to_none=True)

            def keeping(one: nn.Module = one) -> None:
                loss, scores = one(x)
                loss.backward()
                del scores

            peak = peak_above_entry(keeping, cpu)[0]
        peaks.append(peak)
    scores = 4 * ROWS * CLASSES
    assert 0.9 * scores <= peaks[1] - peaks[0]
    resident = x.nbytes + sum(p.nbytes for p in planned.parameters())
    assert peaks[0] + resident <= planned.plan.peak
