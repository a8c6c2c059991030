"""Kronecker-factored statistics of a step's layers, computed by further ops of the captured step."""
