"""From a captured step to the planning problem."""
