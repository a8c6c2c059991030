"""Replay a pipeline's action lists by recursion over what each action waits for, without code of rematplan."""

from functools import cache


class Waits(Exception):
    """An action waits for itself."""


def replayed(schedule, times, latency=0.0, bandwidth=float("inf"), overhead=0.0, credits=None):
    """Start and end of each action by (rank, position). ``times``: of each stage, microseconds and bytes."""
    half = {"F": "F", "B": "B", "I": "B", "W": "W"}
    where, behind, sends, nth = {}, {}, {}, {}
    for r, row in enumerate(schedule.actions):
        for i, a in enumerate(row):
            where[half[a.kind], a.stage, a.microbatch] = r, i
            behind[r, i] = i  # the position of the action after which the message is sent
    for r, row in enumerate(schedule.actions):
        stated = [(i - 1, entry) for i, a in enumerate(row) for entry in a.messages]
        stated += [(len(row) - 1, entry) for entry in row[-1].after]
        for i, (kind, stage, m) in stated:
            if kind in ("SEND_F", "SEND_B"):
                behind[where[kind[-1], stage, m]] = i
        sends[r] = sorted(range(len(row)), key=lambda i, r=r: (behind[r, i], i))
        for at, i in enumerate(sends[r]):
            own = half[row[i].kind], row[i].stage
            nth[r, i] = sum((half[row[j].kind], row[j].stage) == own for j in sends[r][:at])
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
            done = [j for j in sends[r] if behind[r, j] <= i]
            value = max([event("end", r, i), *(event("sent", r, j) for j in done[-1:])])
        elif what == "sent":
            before = sends[r][: sends[r].index(i)]
            value = max([event("end", r, behind[r, i]), *(event("sent", r, j) for j in before[-1:])])
            to = reader(kind, stage)
            if credits is not None and to is not None and nth[r, i] >= credits:
                early = schedule.actions[rank[to]]
                used = [n for n, b in enumerate(early) if half[b.kind] == kind and b.stage == to]
                value = max(value, event("start", rank[to], used[nth[r, i] - credits]))
        elif reader(kind, stage) is None:
            value = event("end", r, i)
        else:  # the link is free again
            same = [
                j
                for j in sends[r][: sends[r].index(i)]
                if half[(b := schedule.actions[r][j]).kind] != "W"
                and (to := reader(half[b.kind], b.stage)) is not None
                and rank[to] == rank[reader(kind, stage)]
            ]
            value = max([event("sent", r, i), *(event("arrives", r, j) - latency for j in same[-1:])])
            value += (t.sends if kind == "F" else t.returns) / bandwidth + latency
        pending.discard((what, r, i))
        return value

    return {
        (r, i): (event("start", r, i), event("end", r, i))
        for r, row in enumerate(schedule.actions)
        for i in range(len(row))
    }
