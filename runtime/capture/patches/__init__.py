"""The changes that capture makes in PyTorch while it runs."""
