"""The columns of an engine's answers: how the engine makes them."""
