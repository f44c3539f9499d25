"""Which prompt is drawn next: from which data set, and whether it is worth it."""
