"""From a plan to code that runs it."""
