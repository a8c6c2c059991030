"""Have the hot loops compiled (once a machine; loaded from the cache after), so that no time limit pays for it."""

from __future__ import annotations

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.annealing.annealer import compile_annealer
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.strategies.exact_dp import ExactDP
from rematplan.planner.strategies.nested_dp import NestedDP


def compile_kernels(progress: Progress = silent) -> None:
    """The annealer's, and those of the block strategies: the dynamic programs', the lowering's, the pricing's."""
    progress(0.0, "loading the hot loops, which each machine compiles once, in about a minute")
    compile_annealer()
    tensors = (Tensor("a", 1), Tensor("b", 1))
    ops = (Op("a", (), ("a",), 1.0, phase="forward"), Op("b", ("a",), ("b",), 1.0, phase="backward"))
    graph = TrainingGraph("forward and backward", tensors, (), ("b",), ops)
    for member in (ExactDP(), NestedDP()):
        member.curve(graph, ())
