"""Rules of prefill and decode engines (--prefill-num-servers)."""

from __future__ import annotations

from importlib.util import find_spec

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models import read_decoder
from slime.records.errors import FlagError
from vime.pool.engine_server import option, pair_up
from vime.vllm.caches.connector import OPTION

_FLAG = "--prefill-num-servers"


def check_prefill_engines(config: Config) -> None:
    """Checks that the policy's engines can pass keys and values to each other."""
    if not (count := config.engine.prefill_num_servers):
        return
    backend, decoder = config.engine.backend_args, read_decoder(read_hf_config(config.rollout.hf_checkpoint))
    excluded = {
        "--rollout-external-engine-addrs": bool(config.rollout.rollout_external_engine_addrs),
        "--rlk-bitwise": config.kernels.rlk_bitwise,
        "--use-rollout-routing-replay": config.off_policy.use_rollout_routing_replay,
        "--vllm-no-enable-prefix-caching": backend.get("enable_prefix_caching") is False,
        "--vllm-pipeline-parallel-size": (backend.get("pipeline_parallel_size") or 1) > 1,
        "--vllm-data-parallel-size": (backend.get("data_parallel_size") or 1) > 1,
        "a model with states of fixed size": decoder.stateful,
    }
    if found := [name for name, excludes in excluded.items() if excludes]:
        raise FlagError(
            _FLAG,
            f"be left out with {found[0]}",
            count,
            "engines that read prompts and answer them need no transfer",
        )


def require_connector(config: Config) -> None:
    """Checks that this host has the package of the connector for GPUs."""
    has_own = OPTION in map(option, pair_up(config.engine.backend_argv))
    if not config.engine.prefill_num_servers or config.cluster.device == "cpu" or has_own:
        return
    if find_spec("nixl") is None:
        raise FlagError(
            _FLAG,
            "have the package nixl on GPUs",
            "none",
            "pip install nixl, or give another connector of vLLM with --vllm-kv-transfer-config",
        )
