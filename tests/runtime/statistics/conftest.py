"""A fixture for laws that hold to the last bits only in double precision."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def double() -> Iterator[None]:
    """Tensors are made in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: statistics of steps are tested, not captures."""
