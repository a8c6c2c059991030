"""Regression search: plan backwards, from a set of tensors that must be resident at once to the empty set.

An action *regresses* an op (its writes leave the set, its reads enter) or *eliminates* a tensor (it is
computed from nothing just before, within `Tables.value` bytes). The *level* is the most bytes on the way.
States of least level are expanded first, as in Dijkstra's algorithm, so what is left over proves a bound.

Two rules lose nothing at a state's level: eliminate what fits, and regress an op at once if it fits, demands
no more bytes, and nothing else demanded depends on it.

A set is *certified* within bytes if its tensors can be eliminated by rising value − size (Sethi and Ullman
1970).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematplan.planner.caches.numba_kernels import inner, kernel
from rematplan.planner.core.array_types import Flags, Ints, Words
from rematplan.planner.least.demands import NEVER, Tables

MOST_CHILDREN = 1024
"""A search ends when there is room for fewer further states than this."""


@inner
def certified_peak(T: Tables, demanded: Ints, n: int, size: int, order: Ints) -> int:
    """Return the peak if the first ``n`` tensors of ``demanded`` leave the set by rising value − size, each computed
    just before within its value. ``size``: their bytes together. ``order`` is overwritten."""
    for i in range(n):  # insertion sort by value - size
        t = demanded[i]
        key, j = T.value[t] - T.size[t], i
        while j > 0 and T.value[order[j - 1]] - T.size[order[j - 1]] > key:
            order[j] = order[j - 1]
            j -= 1
        order[j] = t
    peak = 0
    for i in range(n):
        size -= T.size[order[i]]
        peak = max(peak, size + T.value[order[i]])
    return peak


@inner
def transition(T: Tables, op: int, size: int, marks: Ints) -> tuple[int, int]:
    """Return the bytes resident while an op runs, and those demanded before it. ``size``: the bytes demanded after it.
    ``marks``: 1 for each demanded tensor."""
    during, before = size + T.workspace[op], size
    for k in range(T.writes_at[op], T.writes_at[op + 1]):
        t = T.writes[k]
        if marks[t]:
            before -= T.size[t]
        else:
            during += T.size[t]
    for k in range(T.reads_at[op], T.reads_at[op + 1]):
        t = T.reads[k]
        if not marks[t]:
            during += T.size[t]
            before += T.size[t]
    return during, before


@inner
def regress_op(T: Tables, op: int, demanded: Ints, n: int, marks: Ints) -> int:
    """Replace what ``op`` writes by what it reads, among the first ``n`` tensors of ``demanded`` and in ``marks``, in
    place. Return the new number of tensors."""
    for k in range(T.writes_at[op], T.writes_at[op + 1]):
        if marks[T.writes[k]]:
            marks[T.writes[k]] = 2
    kept = 0
    for i in range(n):
        t = demanded[i]
        if marks[t] == 2:
            marks[t] = 0
        else:
            demanded[kept] = t
            kept += 1
    for k in range(T.reads_at[op], T.reads_at[op + 1]):
        t = T.reads[k]
        if not marks[t]:
            marks[t] = 1
            demanded[kept] = t
            kept += 1
    return kept


@inner
def is_closed(T: Tables, op: int, demanded: Ints, n: int, marks: Ints) -> bool:
    """Return whether no demanded tensor of another op is computed from a demanded one that ``op`` writes; if ``op`` may
    run only once, from any one that it writes."""
    for k in range(T.writes_at[op], T.writes_at[op + 1]):
        t = T.writes[k]
        if marks[t] or T.once[op]:
            for j in range(n):
                x = demanded[j]
                if T.maker[x] != op and (T.ancestors[x, t >> 6] >> np.uint64(t & 63)) & np.uint64(1):
                    return False
    return True


@inner
def eliminate_all(
    T: Tables,
    demanded: Ints,
    n: int,
    size: int,
    level: int,
    marks: Ints,
    frozen: Flags,
    actions: Ints,
    made: int,
) -> tuple[int, int, int]:
    """Remove from the demanded set tensors that can be computed just before within ``level`` bytes, and are not frozen;
    each removal is an action. Return the number of tensors left, their bytes, and the number of actions written.
    ``demanded``, ``marks`` and ``actions`` are changed in place. ``size``: bytes of the first ``n`` of ``demanded``.
    ``made``: number of actions written before."""
    while True:
        best, least = -1, NEVER
        for i in range(n):
            t = demanded[i]
            key = T.value[t] - T.size[t]
            if not frozen[t] and size + key <= level and key < least:
                best, least = i, key
        if best < 0:
            return n, size, made
        t = demanded[best]
        size -= T.size[t]
        marks[t] = 0
        actions[made] = -1 - t
        made += 1
        n -= 1
        demanded[best] = demanded[n]


@inner
def settle(
    T: Tables,
    demanded: Ints,
    n: int,
    size: int,
    level: int,
    marks: Ints,
    frozen: Flags,
    actions: Ints,
    made: int,
) -> tuple[int, int, int]:
    """Repeat two changes until neither is possible: `eliminate_all`, and to replace results of an op by its reads. The
    op fits ``level`` bytes, demands no more, and nothing else demanded depends on it. Arguments, results and what is
    changed in place are those of `eliminate_all`."""
    while True:
        n, size, made = eliminate_all(T, demanded, n, size, level, marks, frozen, actions, made)
        moved, below = False, T.reads_at.size
        for _ in range(n):
            op = -1
            for i in range(n):
                maker = T.maker[demanded[i]]
                if not frozen[demanded[i]] and op < maker < below:
                    op = maker
            if op < 0:
                break
            below = op
            during, before = transition(T, op, size, marks)
            if before > size or during > level or not is_closed(T, op, demanded, n, marks):
                continue
            n, size = regress_op(T, op, demanded, n, marks), before
            actions[made] = op
            made += 1
            moved = True
            break
        if not moved:
            return n, size, made


@inner
def precedes(a: int, b: int, keys: Ints) -> bool:
    """Return whether state ``a`` is expanded before state ``b``: by three keys, then by number."""
    for k in range(3):
        if keys[a, k] != keys[b, k]:
            return bool(keys[a, k] < keys[b, k])
    return a < b


@inner
def push(heap: Ints, length: int, state: int, keys: Ints) -> int:
    """Add a state to a binary heap and return the heap's new length."""
    i = length
    heap[i] = state
    while i > 0 and precedes(heap[i], heap[(i - 1) >> 1], keys):
        heap[i], heap[(i - 1) >> 1] = heap[(i - 1) >> 1], heap[i]
        i = (i - 1) >> 1
    return length + 1


@inner
def pop(heap: Ints, length: int, keys: Ints) -> tuple[int, int]:
    """Remove the first state from a binary heap, in place. Return it and the heap's new length."""
    first, length, i = heap[0], length - 1, 0
    heap[0] = heap[length]
    while 2 * i + 1 < length:
        c = 2 * i + 1
        if c + 1 < length and precedes(heap[c + 1], heap[c], keys):
            c += 1
        if not precedes(heap[c], heap[i], keys):
            break
        heap[c], heap[i] = heap[i], heap[c]
        i = c
    return first, length


@inner
def name_of(T: Tables, demanded: Ints, n: int) -> np.uint64:
    """Return the number that identifies a set of tensors in `slot_of`."""
    name = np.uint64(0)
    for i in range(n):
        name ^= T.hashes[demanded[i]]
    return name


@inner
def slot_of(name: np.uint64, seen: Words) -> np.uint64:
    """Return the place of a set of tensors in a hash table. It holds 0 if the set is not there."""
    name |= np.uint64(1)
    mask = np.uint64(seen.size - 1)
    slot = name & mask
    while seen[slot] != 0 and seen[slot] != name:
        slot = (slot + np.uint64(1)) & mask
    return slot


@inner
def is_new(T: Tables, demanded: Ints, n: int, level: int, seen: Words, levels: Ints) -> bool:
    """Record the set of the first ``n`` tensors of ``demanded`` in the hash table ``seen``, with its level. Return
    whether it was not reached at this or a lower level before."""
    name = name_of(T, demanded, n)
    slot = slot_of(name, seen)
    known = seen[slot] != 0 and levels[slot] <= level
    if not known:
        seen[slot], levels[slot] = name | np.uint64(1), level
    return not known


@inner
def is_dominated(T: Tables, demanded: Ints, n: int, level: int, seen: Words, levels: Ints) -> bool:
    """Return whether the first ``n`` tensors of ``demanded`` without one of them were reached at this or a lower level.
    What computes the whole set also computes the smaller one."""
    name = name_of(T, demanded, n)
    for i in range(n):
        slot = slot_of(name ^ T.hashes[demanded[i]], seen)
        if seen[slot] != 0 and levels[slot] <= level:
            return True
    return False


@kernel
def grown(array: Ints, used: int, more: int) -> Ints:
    """Return an array with room for ``more`` numbers after the first ``used``: ``array`` itself if it has room, else a
    copy."""
    if used + more <= array.size:
        return array
    larger = np.empty(2 * array.size + more, dtype=np.int64)
    larger[:used] = array[:used]
    return larger


@kernel
def path_to(state: int, parent: Ints, first_action: Ints, actions: Ints) -> Ints:
    """Return the actions from the search's start to a state. ``parent``: by state, -1 for the first. ``first_action``:
    by state, where its own actions begin in ``actions``."""
    count, at = 0, state
    while at >= 0:
        count += first_action[at + 1] - first_action[at]
        at = parent[at]
    path, at = np.empty(count, np.int64), state
    while at >= 0:
        own = first_action[at + 1] - first_action[at]
        path[count - own : count] = actions[first_action[at] : first_action[at + 1]]
        count -= own
        at = parent[at]
    return path


@kernel
def regressed(
    T: Tables,
    op: int,
    level: int,
    best: int,
    demanded: Ints,
    n: int,
    size: int,
    marks: Ints,
    frozen: Flags,
    steps: Ints,
    seen: Words,
    levels: Ints,
) -> tuple[bool, int, int, int, int, int]:
    """Regress ``op`` (-1: none) in a set, and settle the set, both in place. Return whether its level is below ``best``
    and the set is new and not dominated. The other results: its level, count and bytes, the number of actions in
    ``steps``, and that of tensors looked at."""
    made, looked, fits = 0, 2 * n, True
    for i in range(n):
        marks[demanded[i]] = 1
    if op >= 0:
        during, before = transition(T, op, size, marks)
        level = max(level, during)
        fits = level < best and (not T.once[op] or is_closed(T, op, demanded, n, marks))
        if fits:
            n, size = regress_op(T, op, demanded, n, marks), before
            steps[0], made = op, 1
    fits = fits and is_new(T, demanded, n, level, seen, levels)
    if fits:
        before = made
        looked += n
        n, size, made = settle(T, demanded, n, size, level, marks, frozen, steps, made)
        looked += n
        fits = made == before or n == 0 or is_new(T, demanded, n, level, seen, levels)
        fits = fits and not is_dominated(T, demanded, n, level, seen, levels)
    for i in range(n):
        marks[demanded[i]] = 0
    return fits, level, n, size, made, looked


@kernel
def search(
    T: Tables, start: Ints, frozen: Flags, low: int, goal: int, limit: int, deepest: bool, enough: int
) -> tuple[int, int, int, Ints, Ints]:
    """Search backwards from ``start``. Return the level (`NEVER` if none is found), a proven lower bound of it, the
    number of tensors looked at, the actions, and the set at their end. ``goal``: bytes to get below; if negative, all
    tensors of the last set can be computed from nothing within the level. ``frozen`` tensors stay demanded. ``low``:
    the level to begin with. The search ends at a level of ``low`` or ``enough`` bytes, or after ``limit`` expanded
    states. ``deepest``: of equal levels, whether the earliest state comes first instead of the smallest."""
    n, size = start.size, 0
    room = n + T.size.size
    demanded, parent_set, order = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    for i in range(n):
        demanded[i] = start[i]
        size += T.size[start[i]]
    best = NEVER
    if goal < 0:
        best = max(low, certified_peak(T, demanded, n, size, order))
    none = np.empty(0, np.int64)
    if best <= max(low, enough):
        return best, low, 0, none, start
    capacity = min(32 * limit + 4096, 1_000_000)
    marks = np.zeros(T.size.size, np.int64)
    pool, actions = np.empty(1 << 14, np.int64), np.empty(1 << 14, np.int64)
    # `settle` regresses an op at most once, and eliminates a tensor at most once for each op that reads it.
    steps = np.empty(room + T.reads.size + T.workspace.size, np.int64)
    first_tensor, first_action = np.empty(capacity + 1, np.int64), np.empty(capacity + 1, np.int64)
    sizes, parent, heap = (
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
    )
    keys = np.empty((capacity, 3), np.int64)
    buckets = 4
    while buckets < 4 * capacity:
        buckets *= 2
    seen, levels = np.zeros(buckets, np.uint64), np.empty(buckets, np.int64)
    first_tensor[0] = first_action[0] = 0
    states, waiting, expanded, end = 0, 0, 0, -1
    # The time of a search is nearly proportional to this: each loop over a set counts its tensors once.
    looked = 0
    bound = low
    # The state that is expanded: -1 before the first, whose one child is ``start``. Other states have a child for each
    # demanded tensor, in which the tensor's op is regressed.
    current, children = -1, 1
    while True:
        if current >= 0 or states:
            if not waiting:
                bound = best
                break
            current, waiting = pop(heap, waiting, keys)
            bound = min(best, keys[current, 0])
            if keys[current, 0] >= best or expanded >= limit or states + MOST_CHILDREN >= capacity:
                break
            expanded += 1
            children = first_tensor[current + 1] - first_tensor[current]
            parent_set[:children] = pool[first_tensor[current] : first_tensor[current + 1]]
        for c in range(children):
            op, level = -1, low
            if current >= 0:
                if frozen[parent_set[c]]:
                    continue
                op, level, known = T.maker[parent_set[c]], keys[current, 0], False
                looked += c
                for i in range(c):  # ops with several demanded results are regressed once
                    known |= T.maker[parent_set[i]] == op and not frozen[parent_set[i]]
                if known:
                    continue
                n, size = children, sizes[current]
                demanded[:n] = parent_set[:n]
            fits, level, n, size, made, more = regressed(
                T, op, level, best, demanded, n, size, marks, frozen, steps, seen, levels
            )
            looked += more
            if not fits:
                continue
            looked += n * (made + 1)
            start_of, acts = first_tensor[states], first_action[states]
            pool, actions = grown(pool, start_of, n), grown(actions, acts, made)
            pool[start_of : start_of + n] = demanded[:n]
            actions[acts : acts + made] = steps[:made]
            sizes[states], parent[states] = size, current
            first_tensor[states + 1], first_action[states + 1] = start_of + n, acts + made
            # The child is state number ``states``, with its set in ``pool`` and its actions in ``actions``.
            reached = NEVER
            if goal < 0:
                reached = max(level, certified_peak(T, demanded, n, size, order))
            elif size < goal:
                reached = level
            if reached < best or (reached == best and end >= 0 and goal >= 0 and size < sizes[end]):
                best, end = reached, states
            latest = -1
            for i in range(n):
                if not frozen[demanded[i]]:
                    latest = max(latest, T.maker[demanded[i]])
            keys[states, 0] = level
            # Of equal levels, the earliest or the smallest state first.
            keys[states, 1], keys[states, 2] = (latest, size) if deepest else (size, latest)
            if level < best and n:
                waiting = push(heap, waiting, states, keys)
            states += 1
            if states >= capacity:
                break
        if best <= max(low, enough):
            break
    if end < 0:
        return best, bound, looked, none, start
    path = path_to(end, parent, first_action, actions)
    return best, bound, looked, path, pool[first_tensor[end] : first_tensor[end + 1]].copy()


@kernel
def _certified(T: Tables, demanded: Ints, size: int) -> int:
    return certified_peak(T, demanded, demanded.size, size, np.empty(demanded.size, np.int64))


def certified(tables: Tables, demanded: Sequence[int]) -> int:
    """Return the bytes within which a set's tensors can be computed one after another, in the order of Sethi and
    Ullman; `NEVER` if one cannot."""
    if not demanded:
        return 0
    return min(NEVER, int(_certified(tables, np.array(demanded, np.int64), int(tables.size[demanded].sum()))))
