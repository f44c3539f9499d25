"""Receipts record the inputs and the results of a run's training steps as a chain of signed hashes (--receipt)."""
