"""What a plan is: schedules, their simulator, the strategy interface. The runtime imports only this room of the
planner."""
