"""Capturing the joint forward and backward graph of a model."""
