"""The temporary memory of a K-FAC step: the bound that a plan counts is never below what is measured."""

import pytest
import torch
from hook_source import HookSource
from torch import nn

import rematplan
from rematplan import KFAC
from rematplan.optim.damped_inverses import INVERSES
from rematplan.optim.factor import Factor
from rematplan.optim.step_memory import INVERSION_COPIES, INVERSION_VECTORS
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.statistics.packing import pack

CPU = torch.device("cpu")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(90, 300), nn.Tanh(), nn.Linear(300, 200, bias=False), nn.Linear(200, 5))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 32, 3, groups=4),
        nn.Flatten(),
        nn.Linear(32 * 9, 5),
    )


SHAPES = {perceptron: (90,), convolutional: (4, 5, 5)}


def peak_of_step(kfac: KFAC) -> int:
    peak, _ = peak_above_entry(kfac.step, CPU)
    return peak


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("inverse", ["auto", *INVERSES])
def test_a_step_allocates_no_more_than_it_says(inverse: str, kind) -> None:
    torch.manual_seed(0)
    model = kind().double()
    kfac = KFAC(
        model, 0.1, source=HookSource(model), others=torch.optim.AdamW, inverse=inverse, weight_decay=0.1
    )
    said = kfac.step_bytes()
    peaks = []
    for _ in range(3):
        x, y = torch.randn(12, *SHAPES[kind], dtype=torch.float64), torch.randint(5, (12,))
        nn.functional.cross_entropy(model(x), y).backward()
        peaks.append(peak_of_step(kfac))
        model.zero_grad(set_to_none=True)
    assert peaks[0] <= said + kfac.reserved_bytes()  # the state is allocated, too
    assert max(peaks[1:]) <= said == kfac.step_bytes()
    assert said < 4 * max(peaks[1:])


@pytest.mark.parametrize("how", INVERSION_COPIES)
@pytest.mark.parametrize("blocks", [(), (2,)])
@pytest.mark.parametrize("rows", [9, 66, 530])
def test_an_inversion_allocates_no_more_than_the_table_says(
    how: str, blocks: tuple[int, ...], rows: int
) -> None:
    factor = Factor(rows, blocks, how, torch.float64)
    samples = torch.randn(*blocks, rows, 2 * rows, dtype=torch.float64)
    factor.fold(pack(samples @ samples.mT), 2 * rows, 0.9)
    peak, _ = peak_above_entry(lambda: factor.invert(1e-2), CPU)
    numbers = samples[..., 0].numel()
    assert peak <= 8 * numbers * (INVERSION_COPIES[how] * rows + INVERSION_VECTORS)


def test_the_budget_bounds_the_step_of_a_reserved_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5))
    x, y = torch.randn(16, 300), torch.randint(5, (16,))
    options = {
        "statistics": rematplan.Kronecker(fisher="empirical"),
        "costs": "roofline",
        "strategy": "store_all",
    }
    planned = rematplan.plan_module(model, (x,), budget="100MiB", **options)
    kfac = KFAC(planned, 0.1, others=torch.optim.AdamW)
    whole = rematplan.plan_module(planned, (x,), budget="100MiB", reserved=[kfac], **options)
    kfac.follow(whole)
    promise = max(plan.peak for plan in rematplan.planning(whole).plans)

    def iteration() -> None:
        nn.functional.cross_entropy(whole(x), y).backward()
        kfac.step()

    iteration()
    whole.zero_grad(set_to_none=True)
    rematplan.planning(whole).take_statistics(None)
    held = sum(t.nbytes for t in (*whole.parameters(), x)) + kfac.reserved_bytes()
    peak, _ = peak_above_entry(iteration, CPU)
    assert held + peak <= promise
