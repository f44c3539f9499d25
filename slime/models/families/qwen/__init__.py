"""Families of Qwen."""
