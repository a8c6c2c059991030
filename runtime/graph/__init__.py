"""The captured step as data, and what is read off it."""
