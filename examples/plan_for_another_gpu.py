"""Which GPUs can train a 6-layer GPT-2 at a batch of 16, and how much extra time does it take? No GPU is needed to
find out.

The network is captured without weights and data, so it takes no memory. A roofline model of each device gives the
cost of each op. The planner then finds the least extra time for each share of the peak.
"""

import rematplan
from rematplan.ir import show_bytes

loaded = rematplan.load_step("gpt12", sizes=rematplan.Sizes(batch=16, depth=6), weightless=True)
print(f"{len(loaded.step.calls)} calls of PyTorch operators")
print("device     step without recomputation   budget      overhead   proven floor")
for device in ("t4", "a100", "h100"):
    graph = rematplan.problem(loaded, device)
    base = rematplan.no_recompute(graph)
    for share in (85, 75):
        budget = base.estimate.peak * share // 100
        plan = rematplan.plan(graph, budget, rematplan.Auto(time_limit=2))
        floor = f"{plan.lower_bound:.2%}" if plan.lower_bound is not None else "none"
        milliseconds = base.estimate.cost / 1000
        print(
            f"{device:10} {milliseconds:23.1f} ms   {show_bytes(budget):11} {plan.estimate.overhead:8.2%} {floor:>12}"
        )
        assert plan.estimate.peak <= budget
