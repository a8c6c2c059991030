"""Byte budgets in trainers of other libraries: one file a library."""
