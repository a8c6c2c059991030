"""Recipes that recover a tensor from what was computed from it."""
