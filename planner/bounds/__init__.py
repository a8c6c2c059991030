"""Proven lower bounds of the overhead, by cuts through the backward pass."""
