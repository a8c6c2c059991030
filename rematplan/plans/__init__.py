"""From a user's options to a plan: budgets, costs, reserved memory, refining, pipelines and trade-off curves."""
