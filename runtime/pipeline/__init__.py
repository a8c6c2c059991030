"""Pipeline parallelism in PyTorch: the action lists of PyTorch's schedules, and stages that run plans."""
