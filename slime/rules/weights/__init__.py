"""Rules about the weights in files: their quantisation, and the checkpoints of all models of a run."""
