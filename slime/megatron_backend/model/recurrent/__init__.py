"""Layers whose state runs through the tokens of a sequence."""
