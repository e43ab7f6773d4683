"""The base layer: torch's private interfaces, memory and its meters, blocks, stages, trees, errors."""
