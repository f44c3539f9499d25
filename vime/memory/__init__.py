"""Shows the memory of a run: the plan by phase, the flags that would make a run fit, and the plan next to a run's
measurements."""
