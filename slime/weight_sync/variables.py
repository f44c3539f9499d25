"""Environment variables that an engine reads to receive weights."""

ENGINE_VARIABLE = "VIME_ENGINE"
"""Name of the engine's server, which changes with each start."""
WEIGHT_DIR_VARIABLE = "VIME_WEIGHT_DIR"
"""The only directory from which the engine reads files of weights."""
LOCAL_DIR_VARIABLE = "VIME_LOCAL_CHECKPOINT_DIR"
"""Directory of the host's copy of the weights. By default it is in the engine's directory of weights."""
