"""One of two processes that save plans of one graph at once.

usage: cache_writer.py RANK CACHE, a folder in which each says that it is ready
"""

import os
import sys
import time
from pathlib import Path

rank, cache = int(sys.argv[1]), Path(sys.argv[2])
os.environ["XDG_CACHE_HOME"] = str(cache)
sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

import problems  # noqa: E402

from rematplan.planner.caches.plan_store import PlanStore  # noqa: E402
from rematplan.planner.strategies.approx_dp import ApproxDP  # noqa: E402

graph = problems.residual((2, 2))
plans = ApproxDP().curve(graph, ())
(cache / f"ready{rank}").touch()
while not (cache / f"ready{1 - rank}").exists():
    time.sleep(0.001)
for k in range(40):
    PlanStore().save(graph, plans[k % len(plans)], 1.0)
    assert PlanStore().saved(graph)
