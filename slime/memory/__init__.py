"""Memory of a run while it runs: what the host and its GPUs hold, by process and by phase."""
