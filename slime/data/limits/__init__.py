"""Limits for the length of rows in prompt files: the engines' context for prompts, the model's context for
conversations."""
