"""Memory of a run while it runs: the memory in use on the host and its GPUs, by process and by phase."""
