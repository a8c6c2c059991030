"""Plans of one structure, evaluated for any sizes of its tensors."""
