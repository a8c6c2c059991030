"""The least peak: values of tensors, constructions of plans near it, and proofs that no plan is below it."""
