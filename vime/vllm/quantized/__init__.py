"""Checks quantised checkpoints before the start: which layers vLLM quantises, and which shapes it loads."""
