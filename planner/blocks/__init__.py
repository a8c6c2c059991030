"""Blocks of the forward half whose tensors are recomputed in the backward half: dynamic programs that choose
them, and their schedules.
"""
