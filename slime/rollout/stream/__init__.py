"""Batches of groups that are generated without end: see stream.py."""
