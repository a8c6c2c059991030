"""What a forward depends on besides its arguments, and whether that still holds."""
