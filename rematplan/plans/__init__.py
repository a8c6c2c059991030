"""From what a user asks to a plan: options, budgets, costs, the plan's search."""
