"""Takes a training step apart into stages, and measures the bytes and times of each."""
