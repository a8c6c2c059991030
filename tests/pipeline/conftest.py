"""Four gloo processes that live as long as the test session, since starting torch takes seconds."""

from collections.abc import Iterator

import pytest
from gloo_workers import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    four = Workers(4, tmp_path_factory.mktemp("gloo"))
    yield four
    four.stop()


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: plans of stages are tested, not captures."""
