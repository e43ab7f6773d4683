"""A schedule as data: what its operations read, what it takes where, and when its transfers start."""
