"""Optimizers on Kronecker-factored statistics."""
