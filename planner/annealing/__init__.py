"""Simulated annealing of schedules: local search over the sequence of op executions, recomputations included."""
