#!/usr/bin/env python3
"""Replay a pipeline file and report what each rank holds and when the pipeline ends.

Independent of the package: standard library only, and no code is shared with the planner. The format is described in
docs/formats.md.

Usage: pipeline_checker.py PIPELINE.json

Prints one JSON object: peaks (bytes of each rank), makespan (microseconds), bubble. Exit status 0: each rank keeps the
budget, and the file's own figures are right. 1: not so; standard error names the first fault. 2: the file cannot be
read.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Key = tuple[Any, ...]
HALF = {"F": "F", "B": "B", "I": "B"}
"""For each kind of action that makes a message, the message's direction: forward (F) or backward (B)."""
PARTS = {"F": ("forward",), "I": ("backward",), "W": ("weight",), "B": ("backward", "weight")}
"""The times that an action of each kind takes."""
TOLERANCE = 1e-9
"""Greatest relative difference between a stated and a replayed time, as sums are rounded in different orders."""


class InvalidPipeline(Exception):
    """The pipeline breaks a rule of the format, or states a figure that the replay contradicts."""


class Clock:
    """When each action ends and each message arrives."""

    def __init__(self, data: Json) -> None:
        self.data = data
        self.rank_of = {s: r for r, own in enumerate(data["stage_of_rank"]) for s in own}
        self.credits = data["plans"][0]["credits"]
        self.free, self.busy = [0.0] * data["ranks"], 0.0
        self.ended: dict[Key, float] = {}
        self.arrived: dict[Key, float] = {}
        self.idle: dict[Key, float] = {}
        self.sent: Counter[Key] = Counter()
        self.read: dict[Key, list[float]] = {}

    def times(self) -> tuple[float, float]:
        """Return makespan and bubble."""
        rows = [self.row(rank) for rank in range(self.data["ranks"])]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while row and row[0][0](rank, *row[0][1:]):
                    row.pop(0)
                    moved = True
        if any(rows):
            raise InvalidPipeline("the actions deadlock")
        makespan = max(self.free)
        return makespan, 1 - self.busy / (makespan * len(rows)) if makespan else 0.0

    def row(self, rank: int) -> list[Key]:
        """What a rank does: actions, and each message after the action after which it is sent."""
        actions = self.data["actions"][rank]
        at = {tuple(entry): place - 1 for place, *entry in self.data["messages"][rank]}
        found: list[list[Key]] = [[(self.run, *action)] for action in actions]
        for place, (kind, stage, m) in enumerate(actions):
            if kind in HALF:
                later = at.get((f"SEND_{HALF[kind]}", stage, m), place)
                found[max(place, later)].append((self.send, HALF[kind], stage, m))
        return [step for steps in found for step in steps]

    def reader(self, half: str, stage: int) -> int:
        return stage + 1 if half == "F" else stage - 1

    def run(self, rank: int, kind: str, stage: int, m: int) -> bool:
        half = HALF.get(kind, "W")
        before = stage - 1 if half == "F" else stage + 1
        own = {"F": (), "B": (("F", stage, m),), "W": (("B", stage, m),)}[half]
        other = ((half, before, m),) if half != "W" and before in self.rank_of else ()
        if not all(key in self.ended for key in own) or not all(key in self.arrived for key in other):
            return False
        start = max(self.free[rank], *(self.ended[k] for k in own), *(self.arrived[k] for k in other), 0.0)
        for key in other:
            self.read.setdefault(key[:2], []).append(start)
        took = sum(self.data["times"][stage][part] for part in PARTS[kind]) + self.data["overhead"]
        self.free[rank], self.busy = start + took, self.busy + took
        self.ended[half, stage, m] = start + took
        if half != "W" and self.rank_of.get(self.reader(half, stage)) == rank:
            self.arrived[half, stage, m] = start + took
        return True

    def send(self, rank: int, half: str, stage: int, m: int) -> bool:
        to = self.rank_of.get(self.reader(half, stage), rank)
        if to == rank:
            return True
        count, read = self.sent[half, stage], self.read.get((half, stage), [])
        if self.credits and count >= self.credits:
            if len(read) <= count - self.credits:
                return False
            self.free[rank] = max(self.free[rank], read[count - self.credits])
        self.sent[half, stage] += 1
        size = self.data["times"][stage]["sends" if half == "F" else "returns"]
        busy = size / (self.data["link"]["bandwidth"] or math.inf)
        self.idle[rank, to] = max(self.free[rank], self.idle.get((rank, to), 0.0)) + busy
        self.arrived[half, stage, m] = self.idle[rank, to] + self.data["link"]["latency"]
        return True


def held_bytes(actions: list[Key], entries: list[Key], plans: dict[int, Json]) -> list[int]:
    """Return the most bytes that a rank holds: at the start, before and during each action, after the last action, and
    at the end of the step. ``plans``: those of its stages, by number."""
    held: dict[Key, int] = {}
    unread = Counter((HALF[kind], stage) for kind, stage, _ in actions if kind in HALF)
    always = sum(p["states"] + p["torch_bytes"] for p in plans.values())

    def total() -> int:
        ahead = sum(
            plans[s]["received" if half == "F" else "answered"] * min(plans[s]["credits"], n)
            for (half, s), n in unread.items()
        )
        return always + sum(held.values()) + ahead

    def changed(position: int) -> int:
        totals = [total()]
        for entry in (entry for place, *entry in entries if place == position):
            change(held, plans, *entry)
            totals.append(total())
        return max(totals)

    found = [always + max(p["opening"] for p in plans.values())]
    for position, (kind, stage, m) in enumerate(actions):
        found.append(changed(position))
        if kind in HALF:
            held.pop(("waits", HALF[kind], stage, m), None)
            unread[HALF[kind], stage] -= 1
        held.pop(("D" if kind == "W" else "K", stage, m), None)
        found.append(total() + transient(held, plans[stage], kind, stage))
        finish(held, plans, kind, stage, m)
    found.append(changed(len(actions)))
    divided = total() + max(p["ending"] for p in plans.values())
    kept = sum(size for key, size in held.items() if key[0] not in ("waits", "sent"))
    return [*found, max(divided, always + kept + sum(p["closing"] for p in plans.values()))]


def change(held: dict[Key, int], plans: dict[int, Json], kind: str, stage: int, m: int) -> None:
    """Change ``held`` by an entry of messages."""
    if kind in ("RECV_F", "RECV_B", "KEEP_B"):
        held["waits", kind[-1], stage, m] = plans[stage]["received" if kind[-1] == "F" else "answered"]
    elif kind == "FORGET_B":
        held.pop(("waits", "B", stage, m), None)
    elif kind in ("DROP_F", "DROP_B"):
        held.pop(("sent", kind[-1], stage, m), None)


def transient(held: dict[Key, int], plan: Json, kind: str, stage: int) -> int:
    """Return the bytes that the running action's micro-batch needs."""
    first_i, first_w = ("early", stage) not in held, ("gradients", stage) not in held
    back = plan["first_backward"] if first_i else None
    late = plan["first_weight"] if first_w else None
    back = plan["transient_backward"] if back is None else back
    late = plan["transient_weight"] if late is None else late
    whole = late + plan["whole"] + (plan["early_gradients"] if first_i else 0)
    return {"F": plan["transient_forward"], "I": back, "W": late, "B": max(back, whole)}[kind]


def finish(held: dict[Key, int], plans: dict[int, Json], kind: str, stage: int, m: int) -> None:
    """Change ``held`` to what exists after an action."""
    plan = plans[stage]
    if kind == "F":
        held["K", stage, m] = plan["kept_bytes"]
        if stage + 1 in plans:
            held["waits", "F", stage + 1, m] = plans[stage + 1]["received"]
        else:
            held["sent", "F", stage, m] = plan["loose"]
    if kind == "I":
        held["D", stage, m] = plan["deferred_bytes"]
    if kind in "BI":
        held["early", stage] = plan["early_gradients"]
        held["left", stage, m] = plan["left"]
        held.pop(("waits", "F", stage + 1, m), None)
        if ("sent", "F", stage, m) in held:
            held["sent", "F", stage, m] = plan["sent"]
        if stage - 1 in plans:
            held["waits", "B", stage - 1, m] = plans[stage - 1]["answered"]
            part = plan["deferred_input"] if kind == "I" else 0
            held["waits", "F", stage, m] = max(0, plan["received"] - part)
        else:
            held["sent", "B", stage, m] = plan["returned"]
    if kind == "W" and ("waits", "F", stage, m) in held:
        held["waits", "F", stage, m] = plan["received"]
    if kind in "BW":
        held["gradients", stage] = plan["gradients"] - plan["early_gradients"]


def check(data: Json) -> Json:
    """Return what the replay finds.

    Raises:
        InvalidPipeline: the actions deadlock, a rank exceeds the budget, or a figure of the file is wrong.
    """
    if data.get("format") != "rematplan.pipeline/1":
        raise InvalidPipeline(f"format is {data.get('format')!r}")
    makespan, bubble = Clock(data).times()
    ranks = zip(data["actions"], data["messages"], data["stage_of_rank"], strict=True)
    peaks = [max(held_bytes(row, entries, {s: data["plans"][s] for s in own})) for row, entries, own in ranks]
    found = {"peaks": peaks, "makespan": makespan, "bubble": bubble}
    if max(peaks) > data["budget"]:
        raise InvalidPipeline(f"rank {peaks.index(max(peaks))} holds {max(peaks)} bytes, above the budget")
    for name, value in found.items():
        stated = data[name]
        near = name == "peaks" or math.isclose(value, stated, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if not near or (name == "peaks" and value != stated):
            raise InvalidPipeline(f"{name} is {value}, not {stated}")
    return found


def main(paths: list[str]) -> int:
    """Check one file and return the exit status."""
    try:
        (path,) = paths
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"cannot read a file: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(check(data)))
    except (InvalidPipeline, KeyError, TypeError, IndexError) as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
