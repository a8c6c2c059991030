"""What the tests of this room share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: steps that were captured are tested, not captures."""
