"""Computations outside of blocks in less memory: the head, its loss, and the gradient of a tied embedding."""
