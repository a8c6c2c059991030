"""A plan's predicted allocations in the formats of two viewers: PyTorch's memory viewer, and Chrome's trace viewer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rematplan.plan_report.replay import Replay

FIRST_ADDRESS = 1 << 32
ALIGNED = 512


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that is allocated (``bytes`` above 0) or freed (below 0). ``at``: the position of the run; -1 before
    the first one."""

    at: int
    bytes: int
    address: int
    what: str


def allocations(replayed: Replay) -> Iterator[Allocation]:
    """Yield what a plan allocates and frees, in order: inputs first, then for each run its writes, its workspace and
    the tensors freed after it. Each allocation has an address of its own; what is there at the end is not freed."""
    top = FIRST_ADDRESS

    def address(size: int) -> int:
        nonlocal top
        found = top
        top += -(-max(size, 1) // ALIGNED) * ALIGNED
        return found

    for kind, size in replayed.fixed.items():
        yield Allocation(-1, size, address(size), kind)
    begins: dict[int, list[Allocation]] = {}
    ends: dict[int, list[Allocation]] = {}
    for stay in replayed.stays:
        if stay.bytes:
            here = Allocation(stay.first, stay.bytes, address(stay.bytes), stay.tensor)
            begins.setdefault(stay.first, []).append(here)
            ends.setdefault(stay.last, []).append(here)
    for at, run in enumerate(replayed.runs):
        yield from begins.get(at, ())
        if run.workspace:
            place = address(run.workspace)
            yield Allocation(at, run.workspace, place, f"workspace of {run.op}")
            yield Allocation(at, -run.workspace, place, f"workspace of {run.op}")
        if at < len(replayed.runs) - 1:  # what is there at the end of the step stays
            yield from (Allocation(at, -a.bytes, a.address, a.what) for a in ends.get(at, ()))


def snapshot(replayed: Replay) -> bytes:
    """Return a pickle in the format of ``torch.cuda.memory._snapshot``, which https://pytorch.org/memory_viz shows.
    Frames name the tensor, the op and its module."""
    trace = []
    for one in allocations(replayed):
        run = replayed.runs[one.at] if one.at >= 0 else None
        names = [one.what, *([run.op, run.module] if run else ["input of the step"])]
        frames = [{"name": name, "filename": "", "line": 0} for name in names if name]
        event = {"addr": one.address, "size": abs(one.bytes), "stream": 0, "frames": frames}
        event["time_us"] = round(run.start if run else 0.0)
        for action in ("alloc",) if one.bytes > 0 else ("free_requested", "free_completed"):
            trace.append({"action": action, **event})
    return pickle.dumps({"segments": [], "device_traces": [trace]})


def chrome_trace(replayed: Replay) -> str:
    """Return JSON in the format of Chrome's trace viewer: a bar for each run, and instant events ``[memory]``, as
    PyTorch's profiler writes them."""
    events: list[dict[str, Any]] = []
    where = {"pid": 1, "tid": 1}
    for run in replayed.runs:
        again = "recomputed" if run.again else "run"
        about = {"module": run.module, "workspace": run.workspace}
        events.append(
            {
                "ph": "X",
                "cat": again,
                "name": run.op,
                "ts": run.start,
                "dur": run.cost,
                "args": about,
                **where,
            }
        )
    total = 0
    for one in allocations(replayed):
        total += one.bytes
        about = {"Total Allocated": total, "Bytes": one.bytes, "Addr": one.address, "Device Id": 0}
        start = replayed.runs[one.at].start if one.at >= 0 else 0.0
        args = {**about, "Device Type": 0, "Total Reserved": 0, "tensor": one.what}
        events.append(
            {
                "ph": "i",
                "s": "t",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "ts": start,
                "args": args,
                **where,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
