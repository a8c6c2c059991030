"""What a plan is: schedules, their simulator, the strategy interface. The runtime sees only this room."""
