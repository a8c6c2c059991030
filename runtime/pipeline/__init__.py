"""Pipeline parallelism in PyTorch: the action lists of PyTorch's pipeline schedules, and pipeline stages that run
plans."""
