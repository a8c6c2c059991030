"""The Kronecker factors of a step's layers, computed by further ops of the captured step: Σ a aᵀ over inputs
and Σ g gᵀ over gradients of outputs."""
