"""What is checked before a run starts, by `vime train` and by `vime plan`."""
