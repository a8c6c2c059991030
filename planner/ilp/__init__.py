"""Integer programs for optimal schedules, and the solver that they use."""
