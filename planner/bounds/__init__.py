"""Prove lower bounds of the overhead and of the peak, for all schedules of a problem."""
