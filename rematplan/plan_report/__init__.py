"""One page about a plan, and its predicted allocations for two viewers."""
