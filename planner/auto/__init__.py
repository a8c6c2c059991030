"""The strategy ``auto``. Under one time limit, it combines the block strategies, simulated annealing and a search for a
proven lower bound of the overhead."""
