"""The memory of a run as commands show it: the plan by phase, what would make a run fit, and the plan next to a run."""
