"""rematplan: a training step within a memory budget, at the least extra time."""
