"""A byte budget for compiled training: the joint graph of AOTAutograd, planned and split by a schedule."""
