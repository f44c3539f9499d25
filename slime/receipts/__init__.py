"""Receipts: what a run trained on and what came out, as a chain of signed hashes (--receipt)."""
