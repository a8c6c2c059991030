"""How to choose: one strategy a file, named as the literature names it; `registry` lists them."""

from rematplan.planner.strategies.registry import STRATEGIES, strategy

__all__ = ["STRATEGIES", "strategy"]
