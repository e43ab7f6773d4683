"""Divides a training step into stages, and measures the bytes and times of each."""
