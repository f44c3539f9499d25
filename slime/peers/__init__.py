"""Checks the server at an address before it gets the run's key."""
