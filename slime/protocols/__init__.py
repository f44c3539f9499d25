"""What the loop needs of the rollout engine, the engine pool, the trainer and the rollout manager."""

from slime.protocols.engines import (
    UNKNOWN_VERSION,
    VERSIONS,
    EnginePool,
    FinishReason,
    GenerateResult,
    NoEngines,
    OnTokens,
    ReplayFields,
    RolloutEngine,
    ScoreResult,
)
from slime.protocols.training import (
    DataSource,
    Evaluated,
    Logged,
    RolloutBatch,
    RolloutHandle,
    ShownSample,
    TrainerHandle,
    TrainResult,
)
from slime.protocols.weights import (
    CHECKPOINT,
    FULL,
    WeightKind,
    WeightSet,
    WeightSource,
    WeightUpdate,
)

__all__ = [
    "CHECKPOINT",
    "FULL",
    "UNKNOWN_VERSION",
    "VERSIONS",
    "DataSource",
    "EnginePool",
    "Evaluated",
    "FinishReason",
    "GenerateResult",
    "Logged",
    "NoEngines",
    "OnTokens",
    "ReplayFields",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutHandle",
    "ScoreResult",
    "ShownSample",
    "TrainResult",
    "TrainerHandle",
    "WeightKind",
    "WeightSet",
    "WeightSource",
    "WeightUpdate",
]
