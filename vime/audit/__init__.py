"""`vime audit RUN_DIR`: finds the source of the difference between a trainer's and an engine's log-probs."""
