"""A schedule as data: the inputs of its operations, its memory over time, and the start of its transfers."""
