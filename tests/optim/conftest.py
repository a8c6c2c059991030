"""Fixtures of the optimizer's tests."""

from collections.abc import Callable

import pytest
from small_networks import SHAPES, maker
from torch import nn


@pytest.fixture(params=SHAPES, ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    """What makes a small network, in two kinds."""
    return maker(request.param)


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: optimizers are tested, not captures."""
