"""The planned `nn.Module`."""
