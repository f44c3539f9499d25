"""One SGLang server as a supervised subprocess: its command line and its environment. The rest is EngineServer's."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from vime.pool.engine_server import EngineServer, EngineSpec, option, pair_up


@dataclass(frozen=True, kw_only=True)
class SglangSpec(EngineSpec):
    """Settings of one SGLang server. `sglang_argv` are SGLang's flags, and override the flags that this module sets."""

    sglang_argv: tuple[str, ...] = ()


class SglangServer(EngineServer):
    """One SGLang server, in the driver or as a Ray actor."""

    name = "the SGLang server"
    spec: SglangSpec

    def command(self) -> list[str]:
        spec = self.spec
        flags = {
            "model-path": spec.model_path,
            "host": spec.host,
            "port": str(spec.port),
            "dtype": spec.dtype,
            "tp-size": str(spec.tensor_parallel_size),
            "device": spec.device,
        }
        argv: list[str] = []
        for name, value in flags.items():
            argv += [f"--{name}", value]
        if spec.trust_remote_code:
            argv += ["--trust-remote-code"]
        options = {option(tokens) for tokens in pair_up(spec.sglang_argv)}
        ours = [token for tokens in pair_up(argv) if option(tokens) not in options for token in tokens]
        return [sys.executable, "-m", "vime.sglang.serve", *ours, *spec.sglang_argv]

    def environment(self) -> dict[str, str]:
        """Returns the variables of every server and those of SGLang. The variables in `spec.env` override both."""
        return {
            **super().environment(),
            # A paused engine generates nothing, and is healthy.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "HF_HUB_OFFLINE": "1",
            **self.spec.env,
        }
