"""Compile plans into code, and run it."""
