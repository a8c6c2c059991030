"""Plans and schedules, the simulator of schedules, and the base classes of strategies. This is the only folder of the
planner that the runtime imports."""
