"""The inner loop of simulated annealing. The energy is the cost plus a price for each byte over the budget.

An increase is accepted with probability exp(−increase ÷ temperature) (Metropolis et al. 1953). Its limit is
drawn before the move, which can be abandoned early.
"""

from __future__ import annotations

import math

from rematplan.planner.annealing.edits import commit, undo
from rematplan.planner.annealing.moves import propose
from rematplan.planner.annealing.splitmix64 import uniform
from rematplan.planner.annealing.state import (
    BEST,
    BEST_COST,
    CEILING,
    COST,
    FREE,
    GROWTH,
    HALF,
    PENALTY,
    PRICE,
    RUNS,
    Problem,
    State,
)
from rematplan.planner.caches.numba_kernels import inner, unlocked_borrowing

ADAPT = 500
"""The largest number of moves between two changes of the price of bytes over the budget."""
STEEP = 1.15
"""The largest factor by which the price of bytes over the budget rises in one change. It rises if hardly any sequence
fits."""


@inner
def keep_best(S: State) -> None:
    """Record the annealer's current sequence of op executions, and its cost, as the best within the budget."""
    length = 0
    for s in range(S.at.size):
        if S.at[s] >= 0:
            S.best[length] = S.op[S.at[s]]
            length += 1
    S.number[BEST] = length
    S.value[BEST_COST] = S.value[COST]


@unlocked_borrowing
def anneal(P: Problem, S: State, moves: int, hot: float, cold: float, mode: int) -> int:
    """Make up to ``moves`` random moves of the sequence in ``S`` while the temperature falls from ``hot`` to ``cold``,
    and return how many. The price of bytes over the budget is adapted, and the cheapest sequence within the budget is
    recorded in ``S``. ``mode``: 1 changes the order alone, 2 ends once the sequence is within the budget. The loop also
    ends if free slots or nodes run short; then a new state is needed."""
    feasible, temperature = 0, hot
    adapt = min(ADAPT, max(40, P.cost.size))
    rise = min(STEEP, S.value[GROWTH] ** adapt)
    ratio = (cold / hot) ** (1.0 / moves)
    S.value[PRICE] = min(S.value[PRICE], S.value[CEILING])
    for k in range(moves):
        temperature *= ratio
        allowed = -temperature * math.log(1.0 - uniform(S.random))
        was = S.value[COST] + S.value[PRICE] * S.value[PENALTY]
        done = propose(P, S, allowed, mode == 1)
        if done and S.value[COST] + S.value[PRICE] * S.value[PENALTY] - was <= allowed:
            commit(S)
        else:
            undo(P, S)
        if S.value[PENALTY] < HALF:
            feasible += 1
            if S.value[COST] < S.value[BEST_COST] - 1e-10:
                keep_best(S)
            if mode == 2:
                return k + 1
        if k % adapt == adapt - 1:
            if feasible < adapt // 10:
                S.value[PRICE] = min(S.value[PRICE] * rise, S.value[CEILING])
            elif feasible > adapt // 2:
                S.value[PRICE] /= 1.08
            feasible = 0
            if S.number[FREE] < S.op.size // 8 or S.number[RUNS] > S.at.size * 3 // 4:
                return k + 1
    return moves
