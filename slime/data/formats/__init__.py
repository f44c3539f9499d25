"""The formats of prompt files that are not read as they are, and what to do about them."""
