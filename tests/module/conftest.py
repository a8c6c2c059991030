"""What the tests of planned modules share."""

import pytest
import torch


@pytest.fixture
def same_draws() -> None:
    """Every test begins with the same random numbers."""
    torch.manual_seed(1)
