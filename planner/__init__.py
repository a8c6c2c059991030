"""Planning: strategies that choose what to recompute, schedules, and the simulator. No module here imports torch."""
