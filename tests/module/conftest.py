"""What the tests of planned modules share."""

import pytest
import torch


@pytest.fixture
def same_draws() -> None:
    """Every test begins with the same random numbers."""
    torch.manual_seed(1)


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: plans are tested, not captures."""
