"""Kronecker-factored statistics of a step's layers, as further ops of the captured step."""
