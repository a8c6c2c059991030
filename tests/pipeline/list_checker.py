"""Replay a pipeline's action lists by recursion over what each action waits for, without code of rematplan."""

from functools import cache


class Waits(Exception):
    """An action waits for itself."""


def replayed(schedule, times, latency=0.0, bandwidth=float("inf"), overhead=0.0, credits=None):
    """Start and end of each action by (rank, position). ``times``: of each stage, microseconds and bytes."""
    half = {"F": "F", "B": "B", "I": "B", "W": "W"}
    where, sent, nth = {}, {}, {}
    for r, row in enumerate(schedule.actions):
        for i, a in enumerate(row):
            where[half[a.kind], a.stage, a.microbatch] = r, i
            queue = sent.setdefault((half[a.kind], a.stage), [])
            nth[r, i] = len(queue)
            queue.append(a.microbatch)
    rank, pending = {a.stage: r for r, row in enumerate(schedule.actions) for a in row}, set()

    def reader(kind, stage):
        to = stage + {"F": 1, "B": -1, "W": 10**9}[kind]
        return to if 0 <= to < schedule.stages and rank[to] != rank[stage] else None

    @cache
    def event(what, r, i):
        if i < 0:
            return 0.0
        if (what, r, i) in pending or i >= len(schedule.actions[r]):
            raise Waits(schedule.actions[r][i])
        pending.add((what, r, i))
        a = schedule.actions[r][i]
        kind, stage, m, t = half[a.kind], a.stage, a.microbatch, times[a.stage]
        if what == "start":
            needs = {"F": [("F", stage - 1)], "B": [("B", stage + 1), ("F", stage)], "W": [("B", stage)]}[
                kind
            ]
            needs = [
                event("arrives" if s != stage else "end", *where[k, s, m])
                for k, s in needs
                if 0 <= s < len(times)
            ]
            value = max([event("free", r, i - 1), *needs])
        elif what == "end":
            spans = {"F": t.forward, "I": t.backward, "W": t.weight, "B": t.backward + t.weight}
            value = event("start", r, i) + spans[a.kind] + overhead
        elif what == "free":  # the rank may go on
            value, to = event("end", r, i), reader(kind, stage)
            if credits is not None and to is not None and nth[r, i] >= credits:
                early = schedule.actions[rank[to]]
                used = [n for n, b in enumerate(early) if half[b.kind] == kind and b.stage == to]
                value = max(value, event("start", rank[to], used[nth[r, i] - credits]))
        elif reader(kind, stage) is None:
            value = event("free", r, i)
        else:  # the link is free again
            same = [
                j
                for j, b in enumerate(schedule.actions[r][:i])
                if half[b.kind] != "W"
                and (to := reader(half[b.kind], b.stage)) is not None
                and rank[to] == rank[reader(kind, stage)]
            ]
            value = max([event("free", r, i), *(event("arrives", r, j) - latency for j in same[-1:])])
            value += (t.sends if kind == "F" else t.returns) / bandwidth + latency
        pending.discard((what, r, i))
        return value

    return {
        (r, i): (event("start", r, i), event("end", r, i))
        for r, row in enumerate(schedule.actions)
        for i in range(len(row))
    }
