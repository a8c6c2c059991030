"""Planning: the strategies that choose what to recompute, the construction of schedules, and the simulator of their
peak and cost. No module here imports torch."""
