"""The `auto` strategy: block plans, annealing and bounds together under one time limit."""
