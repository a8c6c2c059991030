"""Profiled costs: run each distinct call on the present device, measure its time and workspace, and cache the
results.

Arguments are synthetic, so a step that is too large for the machine can be profiled op by op.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rematplan.ir.cache_folder import cache_folder
from rematplan.planner.core.strategy import Progress, silent
from rematplan.runtime.costs import measurement_cache
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.measure import kept_by_libraries, peak_above_entry, seconds_of, unprofiled
from rematplan.runtime.costs.roofline import flops, moved_bytes
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.in_place_calls import as_run
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.graph.warn import warn

_ROUNDS = 2
"""Each distinct call is timed in at least this many rounds: in each round until its executions have taken
`_ENOUGH_SECONDS`, but at most `_MOST_RUNS` times."""
_MOST_ROUNDS = 9
"""The largest number of rounds, on a busy machine."""
_ALIKE = 1.1
"""A call is not timed again if the second shortest of its times is at most this many times the shortest."""
_AGREE = 1.2
"""The machine counts as quiet if the sum of all calls' second shortest times is at most this many times the sum of
their shortest times. Otherwise it is busy, and the costs are not cached."""
_ENOUGH_SECONDS = 0.005
_MOST_RUNS = 10
_ALIGNED = 64
"""Bytes. Tensors whose offsets in their storages differ by a multiple of it have the same signature."""
_CACHE_VERSION = 7


class ProfileWarning(UserWarning):
    """Warns of unreliable costs: a call failed on synthetic arguments and is guessed, or the machine was busy."""


def profile_costs(
    step: CapturedStep,
    progress: Progress = silent,
    cache: Path | None = None,
    only: Collection[str] | None = None,
) -> dict[str, CallCost]:
    """Return, by name, the costs of a step's calls and inverses, without views, measured here unless cached;
    collectives are modelled. ``cache``: the folder, by default the user's. ``only``: the names of the calls in
    question; None: all. A busy machine's costs are not cached, nor are guesses for calls that fail; `ProfileWarning`
    tells of both."""
    priced = [c for c in step.priced_calls if only is None or c.name in only]
    calls = {c.name: signature(step, c) for c in priced if not c.collective}
    file = profile_file(step.device, cache)
    known = measurement_cache.load(file, CallCost, calls.values())
    missing = {s: name for name, s in calls.items() if s not in known}
    times: dict[str, list[float]] = {}
    try:
        unprofiled(partial(_measure_all, step, missing, known, times, progress))
    finally:
        if missing and not _busy(times):
            measurement_cache.save(file, {s: known[s] for s in times})
    # A collective that is run alone would wait forever for other processes, so its cost is modelled.
    return {c.name: known[calls[c.name]] if c.name in calls else _modelled(step, c) for c in priced}


def signature(step: CapturedStep, call: Call) -> str:
    """Return a text of everything on which a call's cost depends: the key by which it is measured and cached."""

    def describe(name: str) -> str:
        t = step.values[name].fake
        offset = t.storage_offset() * t.element_size() % _ALIGNED  # equal slices of one tensor cost the same
        layout = f"{list(t.shape)}{list(t.stride())}@{offset}/{t.untyped_storage().nbytes()}"
        lazy = "conj" * t.is_conj() + "neg" * t.is_neg()
        return str(t.dtype).removeprefix("torch.") + layout + lazy

    return f"{as_run(call).target}{substitute((call.args, dict(call.kwargs)), describe)}"


def _measure_all(
    step: CapturedStep,
    missing: Mapping[str, str],
    known: dict[str, CallCost],
    times: dict[str, list[float]],
    progress: Progress,
) -> None:
    """Measure the calls ``missing`` (names by signature) in rounds. Add costs to ``known`` and each round's
    microseconds to ``times``. Calls that fail get a guess; a `ProfileWarning` tells of these, another of a busy
    machine."""
    arguments = SyntheticArguments(step)
    devices = [step.device] if step.device.type == "cuda" else []
    watched = 1 if devices else 2  # rounds that also measure memory
    as_captured = torch.autocast(step.device.type, enabled=False)  # all casts are in the step
    with torch.random.fork_rng(devices=devices), torch.no_grad(), as_captured:
        refused: dict[str, tuple[Call, Exception]] = {}
        for round_ in range(_MOST_ROUNDS):
            if round_ > _ROUNDS and not _busy(times):
                break
            # After the first `_ROUNDS` rounds, only calls whose two shortest times differ, in one more round,
            # and in further ones while the machine is busy.
            again = [t for t in missing if t not in refused and (round_ < _ROUNDS or _differ(times[t]))]
            for done, text in enumerate(again):
                progress(min(1.0, (round_ + done / len(again)) / _ROUNDS), f"profiling {missing[text]}")
                call = step.call[missing[text]]
                try:
                    cost = _measured(step, call, arguments, known[text] if round_ >= watched else None)
                except (RuntimeError, IndexError, ValueError) as error:
                    refused[text] = call, error
                    times.pop(text, None)
                    known[text] = _guess(step, call)
                else:
                    times.setdefault(text, []).append(cost.time)
                    known[text] = replace(cost, time=min(times[text]))
    progress(1.0, "profiled")
    _say_guesses(tuple(refused.values()))
    if (spread := _spread(times)) > _AGREE:
        warn(
            f"this machine is busy: the second fastest runs of all ops took {100 * (spread - 1):.0f} % longer than the "
            f"fastest; these costs are not cached and will be measured again",
            ProfileWarning,
        )


def _differ(times: Sequence[float]) -> bool:
    """Return whether the second shortest of a call's times is more than `_ALIKE` × the shortest."""
    least, second = sorted(times)[:2]
    return second > _ALIKE * least


def _busy(times: Mapping[str, Sequence[float]]) -> bool:
    return _spread(times) > _AGREE


def _spread(times: Mapping[str, Sequence[float]]) -> float:
    """Return the sum of all calls' second shortest times over that of their shortest; 1 if none was measured twice."""
    repeated = [sorted(t)[:2] for t in times.values() if len(t) > 1]
    least = sum(t[0] for t in repeated)
    return sum(t[1] for t in repeated) / least if least else 1.0


def _guess(step: CapturedStep, call: Call) -> CallCost:
    """Return a guess for a call that fails on synthetic arguments: roofline time, and bytes moved as workspace."""
    return replace(_modelled(step, call), workspace=moved_bytes(step, call))


def _say_guesses(refused: Sequence[tuple[Call, Exception]]) -> None:
    """Warn, if any calls could not be measured, that their costs are guessed, with the first one's name and error."""
    if not refused:
        return
    (call, error), more = refused[0], len(refused) - 1
    others = f" and {more} other op{'s' * (more > 1)}" if more else ""
    warn(
        f"{call.name} ({call.target}){others} cannot be profiled; its cost and workspace are guessed: {error}",
        ProfileWarning,
    )


def _modelled(step: CapturedStep, call: Call) -> CallCost:
    return CallCost(
        device_model("laptop-cpu").time(flops(step, call), moved_bytes(step, call), torch.float32)
    )


def _measured(
    step: CapturedStep, call: Call, arguments: SyntheticArguments, known: CallCost | None
) -> CallCost:
    """Return a call's cost: the shortest time of its executions in this round, with the memory that ``known`` has or,
    if that is None, with measured memory."""
    args, kwargs = arguments.of(call)
    target = deepcopy(as_run(call).target)  # an op that draws labels counts its draws
    run, device = partial(kernel_of(target), *args, **kwargs), step.device
    times: list[float] = []
    if known is None:
        library = kept_by_libraries(run, device)
        seconds, workspace, results = _memory(run, (args, kwargs), device)
        known = CallCost(0.0, workspace, results, library)
        if device.type != "cuda" and seconds >= _ENOUGH_SECONDS:  # recording its memory took negligible time
            times.append(seconds)
    while not times or (sum(times) < _ENOUGH_SECONDS and len(times) < _MOST_RUNS):
        times.append(seconds_of(run, device))
    return replace(known, time=min(times) * 1e6)  # other processes only make it longer


def _memory(
    run: Callable[[], Any], arguments: object, device: torch.device
) -> tuple[float, int, tuple[int, ...]]:
    """Run a call once. Return its seconds, its peak bytes in addition to its results, and the bytes of each result's
    storage. These are 0 if the storage is an argument's, or if the result is no tensor."""

    def timed() -> tuple[Any, float]:
        start = time.perf_counter()
        result = run()
        return result, time.perf_counter() - start

    peak, (result, seconds) = peak_above_entry(timed, device)
    old = {t.untyped_storage()._cdata for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    storages = [
        r.untyped_storage() if isinstance(r, torch.Tensor) else None
        for r in ((result,) if isinstance(result, torch.Tensor) else result)
    ]
    fresh = [s if s is not None and s._cdata not in old else None for s in storages]
    kept = sum({s._cdata: allocated(s.nbytes(), s.device) for s in fresh if s is not None}.values())
    return seconds, max(0, peak - kept), tuple(0 if s is None else s.nbytes() for s in fresh)


def device_name(device: torch.device) -> str:
    """Return the name of a device's hardware: the GPU's model; or the CPU's model and the number of threads that
    PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}-{torch.get_num_threads()}-threads"


def profile_file(device: torch.device, cache: Path | None = None) -> Path:
    """Return the file that keeps what was measured on a device. ``cache``: its folder, by default the user's."""
    return (cache or cache_folder()) / f"profile-{_machine(device)}.json"


def _machine(device: torch.device) -> str:
    """Return a hash of the device, PyTorch's version, the cache format and CUDA's settings that select kernels."""
    parts = [device_name(device), torch.__version__, f"v{_CACHE_VERSION}"]
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        chosen = (
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
        )
        parts.append(f"{chosen} {matmul.fp32_precision} {cudnn.conv.fp32_precision}")  # type: ignore[attr-defined]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
