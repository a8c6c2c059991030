"""Whether a training step fits into a device's memory, before anything runs."""
