"""Several modules of one network, each with a plan of its own, under one common budget; the rest runs in eager mode."""
