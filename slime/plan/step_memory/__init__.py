"""The memory that an optimizer and an indexer need in addition to weights and gradients."""
