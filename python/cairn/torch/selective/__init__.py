"""What autograd saves of a block: what stands for it in the graph, which of it is kept, and how the rest is rebuilt."""
