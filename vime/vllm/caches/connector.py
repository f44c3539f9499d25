"""The connector by which a prefill or a decode engine passes keys and values, as a flag of vLLM's server."""

from __future__ import annotations

import json
from pathlib import Path

from vime.pool.engine_server import EngineSpec

OPTION = "kv-transfer-config"
FOLDER = "prompts"
"""Folder in --weight-dir through which engines on CPUs pass the keys and values of prompts."""
NAME = "name"
"""Key of the connector's own settings: the name of the engine."""


def transfer_flags(spec: EngineSpec) -> list[str]:
    """Returns vLLM's flag for the connector of an engine. The list is empty for an engine that does both.

    On GPUs the connector is NIXL. On CPUs it is vLLM's connector for shared files, see `shared_files`. The user's
    --vllm-kv-transfer-config replaces it.
    """
    if spec.role == "both":
        return []
    # A decode engine computes the blocks that it could not load.
    config: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if spec.device == "cuda":
        config["kv_connector"] = "NixlConnector"
    else:
        config["kv_connector"] = "SharedFileConnector"
        config["kv_connector_module_path"] = "vime.vllm.caches.shared_files"
        folder = str(Path(spec.weight_dir, FOLDER))
        config["kv_connector_extra_config"] = {
            "shared_storage_path": folder,
            NAME: Path(spec.log_path).stem,
        }
    return [f"--{OPTION}", json.dumps(config)]
