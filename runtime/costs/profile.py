"""Profiled costs: run each distinct call on the present device, measure its time and workspace, and cache the results.

Calls are distinct by op, shapes, strides, dtypes and other arguments, so the repeated blocks of a deep network are
measured once. Arguments are synthetic, so a step that is too large for the machine can still be profiled op by op.
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
from rematplan.runtime.costs.device_models import device_model
from rematplan.runtime.costs.measure import kept_by_libraries, peak_above_entry, seconds_of, unprofiled
from rematplan.runtime.costs.profile_cache import load_costs, save_costs
from rematplan.runtime.costs.roofline import flops, moved_bytes
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.graph.warn import warn

Progress = Callable[[float, str], None]

_ROUNDS = 2
"""Each distinct call is timed in at least this many rounds: in each round until its executions have taken
`_ENOUGH_SECONDS`, but at most `_MOST_RUNS` times."""
_MOST_ROUNDS = 9
"""The largest number of rounds, on a busy machine."""
_ALIKE = 1.1
"""A call is not timed in a further round if the second shortest of its times is at most this many times the
shortest."""
_AGREE = 1.2
"""The machine counts as quiet if the sum of all calls' second shortest times is at most this many times the sum of
their shortest times. Otherwise it is busy, and the costs are not cached."""
_ENOUGH_SECONDS = 0.005
_MOST_RUNS = 10
_ALIGNED = 64
"""Bytes. Tensors whose offsets in their storages differ by a multiple of it have the same signature."""
_CACHE_VERSION = 6


class ProfileWarning(UserWarning):
    """A warning that some measured costs are unreliable: a call could not be run on synthetic arguments, so its cost
    is a guess; or the machine was busy."""


def profile_costs(
    step: CapturedStep,
    progress: Progress = lambda _fraction, _text: None,
    cache: Path | None = None,
    only: Collection[str] | None = None,
) -> dict[str, CallCost]:
    """Measure the cost of every call of a captured step that is not a view, and of every inverse (a call that
    recomputes a tensor from later ones), on the present device. Costs in the cache file are not measured again.

    If the measurement is interrupted, the costs measured so far are still written to the cache file. Costs measured
    while the machine is busy are returned but not cached, and a warning (`ProfileWarning`) says so. Calls that cannot
    be measured get a guessed cost, which is not cached. A warning names them.
    """
    priced = [c for c in step.priced_calls if only is None or c.name in only]
    calls = {c.name: signature(step, c) for c in priced if not c.collective}
    file = (cache or cache_folder()) / f"profile-{_machine(step.device)}.json"
    known = load_costs(file)
    missing = {s: name for name, s in calls.items() if s not in known}
    times: dict[str, list[float]] = {}
    try:
        unprofiled(partial(_measure_all, step, missing, known, times, progress))
    finally:
        if missing and not _busy(times):
            save_costs(file, {s: known[s] for s in times})
    # A collective that is run alone would wait forever for other processes, so its cost is modelled.
    return {c.name: known[calls[c.name]] if c.name in calls else _modelled(step, c) for c in priced}


def signature(step: CapturedStep, call: Call) -> str:
    """Return a text that contains everything on which the cost of a call depends: op, shapes, strides, types and other
    arguments. Calls with equal texts are measured once. The text is the key of the cost in cache files and profiles."""

    def describe(name: str) -> str:
        t = step.values[name].fake
        offset = t.storage_offset() * t.element_size() % _ALIGNED  # equal slices of one tensor cost the same
        layout = f"{list(t.shape)}{list(t.stride())}@{offset}/{t.untyped_storage().nbytes()}"
        return str(t.dtype).removeprefix("torch.") + layout

    return f"{call.target}{substitute((call.args, dict(call.kwargs)), describe)}"


def _measure_all(
    step: CapturedStep,
    missing: Mapping[str, str],
    known: dict[str, CallCost],
    times: dict[str, list[float]],
    progress: Progress,
) -> None:
    """Measure calls of a step in several rounds, and add their costs to ``known``.

    Each round runs all calls one after the other, so that a slow period of the machine affects all of them alike.
    After the first `_ROUNDS` rounds, only calls whose two shortest times differ (`_differ`) are measured again: in one
    more round, and in further rounds while the machine is busy, up to `_MOST_ROUNDS` in total.
    """
    arguments = SyntheticArguments(step)
    devices = [step.device] if step.device.type == "cuda" else []
    watched = 1 if devices else 2  # rounds that also measure memory
    as_captured = torch.autocast(step.device.type, enabled=False)  # all casts are in the step
    with torch.random.fork_rng(devices=devices), torch.no_grad(), as_captured:
        refused: dict[str, tuple[Call, Exception]] = {}
        for round_ in range(_MOST_ROUNDS):
            if round_ > _ROUNDS and not _busy(times):
                break
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
    """Return how much the times of one call vary: the sum of the second shortest times of all calls, divided by the
    sum of their shortest times. It is 1 if no call was measured twice. ``times``: by signature, the shortest time of
    each round."""
    repeated = [sorted(t)[:2] for t in times.values() if len(t) > 1]
    least = sum(t[0] for t in repeated)
    return sum(t[1] for t in repeated) / least if least else 1.0


def _guess(step: CapturedStep, call: Call) -> CallCost:
    """Return a guessed cost for a call that fails on synthetic arguments, such as a factorisation of a random matrix.
    The time is that of the roofline model of a laptop. The workspace is the number of bytes that the call reads and
    writes."""
    return replace(_modelled(step, call), workspace=moved_bytes(step, call))


def _say_guesses(refused: Sequence[tuple[Call, Exception]]) -> None:
    """Warn once that some calls could not be measured and their costs are guessed. ``refused``: each such call with
    the exception that it raised. The warning names the first."""
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
    """Measure a call in one round and return its cost: the shortest time of several executions, and its memory."""
    args, kwargs = arguments.of(call)
    target = deepcopy(call.target)  # an op that draws labels counts its draws
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
    """Run a call once, and return its duration in seconds, its peak bytes in addition to its results, and for each
    result the real bytes of its storage (0 if it shares the storage of an argument or is no tensor).
    """

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


def _machine(device: torch.device) -> str:
    """Return a hash of everything on which measured costs depend, other than the call: the device, PyTorch's version,
    the number of threads on a CPU, and on CUDA the settings that select kernels. The version of the cache format is
    hashed, too."""
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
