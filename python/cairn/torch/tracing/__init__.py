"""One training step as a graph of operators: recorded, proved, measured, and run by a schedule."""
