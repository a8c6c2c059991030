"""The captured step as data, and analyses of it."""
