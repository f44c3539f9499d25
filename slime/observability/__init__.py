"""Import paths of slime plug-ins: the metrics of samples, and how a function of the user logs."""
