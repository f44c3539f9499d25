"""What vLLM loads from the `vllm.general_plugins` entry point, in every process of an engine server."""

from __future__ import annotations

BACKEND = "vime_file"


def register() -> None:
    """Make `--weight-transfer-config {"backend": "vime_file"}` known to vLLM. May run more than once a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vime.engine.weight_receiver", "FileWeightTransferEngine"
        )
