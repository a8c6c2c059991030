"""Evaluate plans that were found for one problem at the sizes of other problems with the same ops and tensors."""
