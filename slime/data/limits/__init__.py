"""The lengths that rows of prompt files may have: engines' contexts for prompts, the model's own for conversations."""
