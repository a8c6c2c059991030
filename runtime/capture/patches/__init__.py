"""What capture changes in PyTorch while it runs."""
