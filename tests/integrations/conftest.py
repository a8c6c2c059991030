"""No test of a trainer inherits the process group of another, or the ranks and addresses in the environment from which
the next trainer would make one."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def without_a_group() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _once(one_capture: None) -> None:
    """Of all files: trainers are tested, not captures."""
