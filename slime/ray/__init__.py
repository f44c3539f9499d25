"""Import paths of slime plug-ins. The actors of a run are in slime.cluster."""
