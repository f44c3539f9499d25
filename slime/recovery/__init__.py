"""Restarts of the trainer inside a run: the data of the steps since the last checkpoint, and their repetition."""
