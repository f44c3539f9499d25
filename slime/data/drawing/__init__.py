"""Chooses the next prompt: the data set, the order, and the prompts that an epoch leaves out."""
