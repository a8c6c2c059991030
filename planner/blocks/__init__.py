"""Divide the forward half into blocks whose tensors are recomputed during the backward half: graphs of blocks, dynamic
programs that choose them, and their conversion to schedules."""
