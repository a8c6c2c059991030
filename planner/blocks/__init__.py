"""Block partitions of the forward graph, their dynamic programs, and their lowering to schedules."""
