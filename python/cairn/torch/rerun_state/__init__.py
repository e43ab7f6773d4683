"""The state that a block reads and writes besides its arguments and its result: recorded, compared, restored."""
