"""The planning problem as arrays: indices, adjacency, phases."""
