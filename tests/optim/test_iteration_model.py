"""The model of an iteration's time: factors of which only the diagonal is inverted."""

import pytest
import torch
from torch import nn

from rematplan.optim.iteration_model import IterationModel, Link
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.costs.device_models import DeviceModel
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.insert import with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import shapes

DEVICE = DeviceModel("slow", "10⁹ operations and 10⁹ bytes a second", {"float32": 1e-3}, 1.0, 0.0)
FEATURES = 3


def parts(words: int) -> dict[str, float]:
    """Microseconds of K-FAC's parts on one device, for a layer of ``words`` outputs."""
    step = capture(nn.Linear(FEATURES, words, bias=False), (torch.randn(2, FEATURES),), "vocabulary")
    counted = with_statistics(step, Kronecker(fisher="empirical"), Draws(0))
    model = IterationModel(step, counted.step, shapes(counted), DEVICE, Link(1, 0), 1, 1)
    return dict(model.kfac(1).times)


def test_a_diagonal_is_inverted_and_applied_in_time_linear_in_its_size() -> None:
    words = 20_000
    one, double = parts(words), parts(2 * words)
    side = FEATURES**2 * 2 * 4 / 1e3  # microseconds to move the factor of the inputs and its inverse
    assert one["inverses"] == pytest.approx(side + words * 2 * 4 / 1e3)
    assert double["inverses"] == pytest.approx(side + 2 * words * 2 * 4 / 1e3)
    assert double["update"] == pytest.approx(2 * one["update"], rel=1e-3)


def test_a_dense_factor_is_inverted_in_cubic_time() -> None:
    assert parts(2_000)["inverses"] == pytest.approx((2_000**3 + FEATURES**2 * 8) / 1e3, rel=1e-6)
