"""The planning problem as arrays: numbers in place of names, which op reads and writes which tensor, and the forward
and the backward half."""
