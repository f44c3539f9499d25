"""The matrix products of a model's linear layers and experts, and functions that change their operands."""
