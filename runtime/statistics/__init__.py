"""Statistics of a step's layers: the Kronecker factors Σ a aᵀ over a layer's inputs and Σ g gᵀ over the gradients of
its outputs. Further ops of the captured step compute them."""
