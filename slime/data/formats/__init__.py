"""The formats of prompt files that a run does not read, and the remedy for each format."""
