"""Captured steps with open sizes: the sizes are expressions of the batch's sizes. A guard states for which batches one
capture is valid."""
