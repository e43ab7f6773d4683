"""Selective recomputation: a block's saved-tensor hooks, which saved tensors it keeps, how it recomputes the others."""
