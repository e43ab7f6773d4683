"""What a training step will take, without its device and without its memory: the step runs on fake tensors."""
