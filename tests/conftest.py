"""Settings of all tests: one torch thread, since several test processes share the cores; a separate cache folder, so
that tests neither read nor write the user's; and on CUDA the cuBLAS workspace for reproducible bits, set before
cuBLAS is used. Inductor compiles in the test process, since each process of a pool loads PyTorch anew.
It writes loops for no vector unit, or it would first compile programs to find what this machine has. PyTorch keeps
that for the whole process, but not in the keys of its cache on disk: all tests and their subprocesses must agree.
"""

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import checker as plan_checker
import numpy as np
import pytest
import torch
from captured_once import captured_once

from rematplan import api
from rematplan.ir.cache_folder import cache_folder
from rematplan.models import (
    ZOO,
    densenet,
    diffusion_unet,
    efficientnet,
    googlenet,
    mobilenet,
    pspnet,
    resnet,
    revcol,
    revnet,
    revvit,
    swin,
    unet,
)
from rematplan.runtime.graph.compat import functorch_config, inductor_config

torch.set_num_threads(1)
gc.disable()  # until all is loaded
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # for subprocesses
inductor_config.cpp.vec_isa_ok = False

BLOCKS = (2, 2)
"""Of each stage: one that changes the shape, and one that does not."""
DILATED = (1, 1, 1, 2)
"""Only the last two stages dilate; one has a block that does not change the shape."""
MOVES_BACK = 10_000


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    own, kernels = tmp_path_factory.mktemp("cache"), cache_folder() / "kernels"
    (own / "rematplan").mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    # Machine code is everybody's: it takes a minute to compile.
    (own / "rematplan" / "kernels").symlink_to(kernels)
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
        functorch_config.activation_memory_budget,
    )


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """A test that leaves another setting of PyTorch behind changes the tests after it, which depend on their order.
    All tests draw the same numbers in each run."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    before = _settings()
    yield
    assert _settings() == before


@pytest.fixture(scope="session", autouse=True)
def _never_busy() -> Iterator[None]:
    """Costs that are measured beside other programs count as a quiet machine's: they are cached, without a warning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("rematplan.runtime.costs.profile"), "_AGREE", float("inf"))
        yield


@pytest.fixture(scope="module")
def few_blocks() -> Iterator[None]:
    """The zoo's networks with fewer of the same stages and blocks: tracing them takes as long as they are deep."""
    import_module("rematplan.models.zoo")  # which reads the networks' own depths once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(densenet, "DEPTHS", {121: (densenet.DEPTHS[121][0], BLOCKS)})
        patch.setattr(diffusion_unet, "BLOCKS", 1)
        patch.setattr(diffusion_unet, "MULTIPLES", diffusion_unet.MULTIPLES[:2])
        patch.setattr(efficientnet, "ROWS", efficientnet.ROWS[:3])
        patch.setattr(googlenet, "STAGES", tuple(stage[:1] for stage in googlenet.STAGES[:2]))
        patch.setattr(mobilenet, "ROWS", mobilenet.ROWS[:3])
        patch.setattr(pspnet, "DEPTHS", {101: (pspnet.DEPTHS[101][0], DILATED)})
        patch.setattr(resnet, "DEPTHS", {n: (resnet.DEPTHS[n][0], BLOCKS) for n in (18, 50)})
        patch.setattr(revcol, "BLOCKS", (1, 1, 1))
        patch.setattr(revnet, "BLOCKS", {38: 2, 110: 5})
        patch.setattr(revvit, "BLOCKS", BLOCKS)
        patch.setattr(swin, "BLOCKS", BLOCKS)
        patch.setattr(unet, "LEVELS", 2)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_moves_back() -> Iterator[None]:
    """Searches back in time for the smallest peak make few moves, but for the tests of the planner. At the least they
    would take a second each."""
    search = import_module("rematplan.planner.auto.smallest_peak_search")
    short = replace(search.PEAK_SEARCH, regression_moves=MOVES_BACK, least_regression=MOVES_BACK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "PEAK_SEARCH", short)
        yield


@pytest.fixture(scope="module")
def few_searches() -> Iterator[None]:
    """Searches for plans of several modules, or of several stages, are short."""
    tasks = import_module("planned_tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.rank_search, "LIMITS", tasks.FEW)
        yield


@pytest.fixture(scope="module")
def one_capture() -> Iterator[None]:
    """Models that are alike are captured once for the tests of a file."""
    with captured_once():
        yield


@pytest.fixture(scope="module")
def one_load(one_capture: None) -> Iterator[None]:
    """A network or a file is captured once for the commands of a file that load it alike: nothing changes a loaded
    step."""
    load, loaded = api.load_step, {}

    def load_once(model: str | Path, **options: Any) -> api.LoadedStep:
        written = None if model in ZOO or not Path(model).exists() else Path(model).stat().st_mtime_ns
        key = repr((model, written, sorted(options.items())))
        if key not in loaded:
            loaded[key] = load(model, **options)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load_step", load_once)
        yield


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
