"""Settings of all tests: one torch thread, since several test processes share the cores; a separate cache folder, so
that tests neither read nor write the user's; and on CUDA the cuBLAS workspace for reproducible bits, set before
cuBLAS is used. Inductor compiles in the test process, since each process of a pool loads PyTorch anew.
"""

import gc
import os
from collections.abc import Iterator
from types import ModuleType

import checker as plan_checker
import pytest
import torch

from rematplan.ir.cache_folder import cache_folder

torch.set_num_threads(1)
gc.disable()  # until all is loaded
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    own, kernels = tmp_path_factory.mktemp("cache"), cache_folder() / "kernels"
    (own / "rematplan").mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (own / "rematplan" / "kernels").symlink_to(
        kernels
    )  # machine code is everybody's: it takes a minute to compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


def _settings() -> tuple[object, ...]:
    return (
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
    )


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """A test that leaves another setting of PyTorch behind changes the tests after it, which depend on their order."""
    before = _settings()
    yield
    assert _settings() == before


@pytest.fixture(scope="session")
def checker() -> ModuleType:
    """The independent checker of problem and plan files."""
    return plan_checker


def pytest_collection_finish() -> None:
    """What is loaded stays loaded: the collector need not go through all of PyTorch each time. And it comes seldom:
    tracing makes so many small objects that with Python's own thresholds it takes a tenth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()
