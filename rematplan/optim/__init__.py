"""The K-FAC optimizer. It preconditions gradients with the Kronecker factors that a planned module computes."""
