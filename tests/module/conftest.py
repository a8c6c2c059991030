"""What the tests of planned modules share."""

from collections.abc import Iterator

import pytest
import torch
from planned_tasks import FEW

from rematplan.planner.pipeline import rank_search


@pytest.fixture(scope="module")
def few_searches() -> Iterator[None]:
    """Searches for plans of several modules are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_search, "LIMITS", FEW)
        yield


@pytest.fixture
def same_draws() -> None:
    """Every test begins with the same random numbers."""
    torch.manual_seed(1)
