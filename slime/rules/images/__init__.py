"""Rules of runs whose prompts have images."""
