"""Compile the planner's numba loops before a search with a time limit. Each machine compiles once, and caches
on disk.
"""

from __future__ import annotations

from numba.core.dispatcher import Dispatcher

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing import annealer, moves
from rematplan.planner.annealing.annealer import compile_annealer
from rematplan.planner.arrays.precedence import precedence
from rematplan.planner.auto import eviction_kernel, exhaustive_kernel
from rematplan.planner.auto.eviction import plan_by_eviction
from rematplan.planner.auto.exhaustive import exhaustive
from rematplan.planner.blocks import interval_dp, lower_set_dp, lowering_kernel
from rematplan.planner.bounds import tail_kernels
from rematplan.planner.bounds.tail_search import TailSearch
from rematplan.planner.caches.numba_kernels import are_compiled
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.least import regression, reuse
from rematplan.planner.least.near_least import plan_near_least
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.nested_dp import NestedDP

HOT = (
    annealer,
    moves,
    lowering_kernel,
    lower_set_dp,
    interval_dp,
    tail_kernels,
    regression,
    reuse,
    eviction_kernel,
    exhaustive_kernel,
)
"""The modules whose compiled loops are called from Python."""


def kernels_are_ready() -> bool:
    """Return whether all of the planner's numba loops are loaded or cached on disk, so that `compile_kernels` compiles
    nothing."""
    return are_compiled(loop for hot in HOT for loop in vars(hot).values() if isinstance(loop, Dispatcher))


def compile_kernels(progress: Progress = silent) -> None:
    """Compile the planner's numba loops, or load them, by running each on a tiny problem. ``progress`` is
    called once.
    """
    progress(0.0, "loading the hot loops, which each machine compiles once, in about a minute")
    compile_annealer()
    tensors = (Tensor("a", 1), Tensor("b", 1))
    ops = (Op("a", (), ("a",), 1.0, phase="forward"), Op("b", ("a",), ("b",), 1.0, phase="backward"))
    graph = TrainingGraph("forward and backward", tensors, (), ("b",), ops)
    for member in (ExactDP(), NestedDP()):
        member.curve(graph, ())
    exhaustive(graph, 2)
    plan_by_eviction(graph, 2, Effort(moves=1000), tries=1)
    plan_near_least(graph, 10**9, Effort(moves=1000))
    TailSearch(graph, precedence(graph), (1,), 0, 10**9).proves(0.1, 100)
