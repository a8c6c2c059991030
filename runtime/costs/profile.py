"""Profiled costs: run each distinct call on the present device, measure its time and workspace, and cache the
results.

Calls are distinct by op, shapes, strides, dtypes and other arguments, so the repeated blocks of a deep
network are measured once. Arguments are synthetic: a step too large for the machine can still be profiled op
by op.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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

ATEN = torch.ops.aten

_ROUNDS = 2
"""Each distinct call is timed in this many rounds, in each of them for `_ENOUGH_SECONDS` or `_MOST_RUNS`."""
_MOST_ROUNDS = 9
_ALIKE = 1.1
"""A call whose second least time is at most this many times its least one is not timed again."""
_AGREE = 1.2
"""If the second least times of all calls add up to at most this many times the least ones, the machine was
quiet and the least times are used."""
_ENOUGH_SECONDS = 0.005
_MOST_RUNS = 10
_ALIGNED = 64
"""Bytes; calls on parts of a tensor that begin at multiples of it cost the same."""
_CACHE_VERSION = 5


class ProfileWarning(UserWarning):
    """A warning that some measured costs are unreliable: a call could not be run on synthetic arguments, so that its
    cost is a guess, or the machine was busy."""


def profile_costs(
    step: CapturedStep,
    progress: Progress = lambda _fraction, _text: None,
    cache: Path | None = None,
    only: Collection[str] | None = None,
) -> dict[str, CallCost]:
    """Measure the cost of every call of a step that is not a view, and of every inverse (a call that recomputes a
    tensor from later ones), on the present device.

    Interrupting keeps the measurements so far in the cache file. Measurements on a busy machine are returned but not
    cached. A warning (`ProfileWarning`) says so, and says which calls could not be measured.

    Args:
        step: the captured step.
        progress: is called with the finished fraction (0 to 1) and a text.
        cache: the folder of the cache file; None for ``$XDG_CACHE_HOME/rematplan``.
        only: the names of the calls to measure; None for all.

    Returns:
        The costs of the measured calls by name: microseconds, bytes of workspace, real bytes of the results.
            Collectives are not run, as they would wait for other processes; their costs are modelled.
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
            save_costs(file, {s: known[s] for s in missing if s in known})
    # A collective would wait for other processes, which may not measure anything.
    return {c.name: known[calls[c.name]] if c.name in calls else _modelled(step, c) for c in priced}


def signature(step: CapturedStep, call: Call) -> str:
    """Return, as text, everything on which the cost of a call depends: op, shapes, strides, types and other
    arguments. Calls with the same signature are measured once; it is the key in profiles."""

    def describe(name: str) -> str:
        t = step.values[name].fake
        offset = t.storage_offset() * t.element_size() % _ALIGNED  # parts of one tensor are alike
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
    """Measure the calls of ``missing`` and add their costs to ``known``.

    Each round runs every call once, so that a slow period of the machine affects all alike. Calls whose times
    agree are left out of further rounds, which are added while the machine is busy. ``times`` collects the least
    time of each round, in microseconds.
    """
    arguments = SyntheticArguments(step)
    devices = [step.device] if step.device.type == "cuda" else []
    watched = 1 if devices else 2  # rounds whose first runs are for the memory
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
    """Return whether the two least times of a call disagree."""
    least, second = sorted(times)[:2]
    return second > _ALIKE * least


def _busy(times: Mapping[str, Sequence[float]]) -> bool:
    return _spread(times) > _AGREE


def _spread(times: Mapping[str, Sequence[float]]) -> float:
    """Return the sum of the second least times of all calls divided by the sum of the least ones; 1 if no
    call was repeated."""
    repeated = [sorted(t)[:2] for t in times.values() if len(t) > 1]
    least = sum(t[0] for t in repeated)
    return sum(t[1] for t in repeated) / least if least else 1.0


def _guess(step: CapturedStep, call: Call) -> CallCost:
    """Return a guess for a call that fails on synthetic arguments (a factorisation of a random matrix, for
    example): the roofline time of a laptop, and a workspace of all bytes that it reads and writes."""
    return replace(_modelled(step, call), workspace=moved_bytes(step, call))


def _say_guesses(refused: Sequence[tuple[Call, Exception]]) -> None:
    """Warn once about all calls that could not be measured, with the reason of the first."""
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
    """Return the cost of a call by its runs in one round.

    Args:
        known: its cost by an earlier round, with its memory; None if that is not known yet. Memory is that of a
            second run, since the first may load libraries.
    """
    args, kwargs = arguments.of(call)
    run, device = partial(kernel_of(call.target), *args, **kwargs), step.device
    times: list[float] = []
    if known is None:
        library = kept_by_libraries(run, device)
        seconds, workspace, results = _memory(run, (args, kwargs), device)
        known = CallCost(0.0, workspace, results, library)
        if device.type != "cuda" and seconds >= _ENOUGH_SECONDS:  # long enough for watching it not to count
            times.append(seconds)
    while not times or (sum(times) < _ENOUGH_SECONDS and len(times) < _MOST_RUNS):
        times.append(seconds_of(run, device))
    return replace(known, time=min(times) * 1e6)  # noise only adds


def _memory(
    run: Callable[[], Any], arguments: object, device: torch.device
) -> tuple[float, int, tuple[int, ...]]:
    """Return the seconds of a call, its peak bytes in addition to its results, and the real bytes of these.

    Args:
        run: the call.
        arguments: its arguments.
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
    """Return the name of the device's model, such as that of a GPU; for a CPU, followed by the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}-{torch.get_num_threads()}-threads"


def _machine(device: torch.device) -> str:
    """Return a hash of everything for which the timings are valid: the device, PyTorch's version, the number
    of threads, and on CUDA the settings that select kernels."""
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
