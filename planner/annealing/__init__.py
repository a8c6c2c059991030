"""Simulated annealing of the sequence of runs."""
