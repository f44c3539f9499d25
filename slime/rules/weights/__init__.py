"""Rules about the weights in files: their quantisation, and the checkpoints that a run reads."""
