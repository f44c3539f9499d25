"""Environment variables with which an engine is told what it needs to receive weights."""

ENGINE_VARIABLE = "VIME_ENGINE"
"""The name of the engine's server, which changes with each start."""
WEIGHT_DIR_VARIABLE = "VIME_WEIGHT_DIR"
"""The only directory that the engine reads files of weights from."""
LOCAL_DIR_VARIABLE = "VIME_LOCAL_CHECKPOINT_DIR"
"""Where the engine's host keeps its copy of the weights, by default in the engine's directory of weights."""
