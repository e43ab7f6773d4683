"""What the benchmarks share; every other file of bench/ is a benchmark."""
