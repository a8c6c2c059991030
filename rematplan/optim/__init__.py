"""The K-FAC optimizer, which reads Kronecker factors of a planned module and preconditions gradients with them."""
