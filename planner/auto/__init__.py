"""The strategy ``auto``: block strategies, annealing and a search for lower bounds, under one time limit."""
