"""The captured step (a training step as a sequence of ATen calls), and analyses of it."""
