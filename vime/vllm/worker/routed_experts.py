"""The experts to which the engine sent each token, in its answers to requests for them (--use-rollout-routing-replay).

vLLM collects them (--enable-return-routed-experts) and keeps them with its prefix cache, so the tokens of a cached
prompt have theirs. Only vLLM's newer model runner returns them, and on CPUs that runner needs a Triton for CPUs.
`install` therefore wraps the older runner on CPUs: its set-up, its step, and the check that rejects the flag. Only
requests with `START_FIELD` get experts (see group_route). Evaluations do not request them.

Shapes: N tokens of prompt and response, L layers of the model, K experts per token. The last token of a response is
never computed, so the rows are [N - 1, L, K]. A layer without experts has zeros.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class _Runner(CPUModelRunner):
        """vLLM's runner with what it gets here."""

        aux_output_connector: Any
        routed_step: dict[str, int]


T = TypeVar("T")
FLAG = "--enable-return-routed-experts"
VARIABLE = "VIME_ROUTED_EXPERTS"
"""Set in the environment of a server that was started with the flag."""
START_FIELD = "routed_experts_prompt_start"
"""vLLM's sampling parameter: how many tokens of the prompt need no row."""


def decode(file: bytes | None, *, tokens: int, start: int) -> np.ndarray:
    """The answer's `routed_experts` -> rows of tokens [start, tokens - 1): uint8 or uint16 [tokens - 1 - start, L, K].

    ValueError when there is none, when it is no such array, and when its rows are not those of the tokens.
    """
    if file is None:
        raise ValueError(
            f"the engine must give the experts of each token, got none for {tokens} tokens; check that it runs "
            f"with {FLAG}"
        )
    rows: np.ndarray = np.load(io.BytesIO(file), allow_pickle=False)
    if rows.ndim != 3 or rows.dtype.kind != "u":
        raise ValueError(
            f"the engine must give experts as unsigned [tokens, layers, k], got {rows.dtype} {list(rows.shape)}"
        )
    if len(rows) == tokens - 1:  # the server knows no start
        rows = rows[start:]
    if len(rows) != tokens - 1 - start:
        raise ValueError(
            f"the engine must give one row of experts per token that it computed, got {len(rows)} for tokens "
            f"[{start}, {tokens - 1})"
        )
    return rows


def install() -> None:
    """Let the older model runner of CPUs hand on what vLLM's collector has. May run more than once."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _let_older_runner()


def _let_older_runner() -> None:
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner.execute_model, "wraps"):
        return
    if not hasattr(VllmConfig, "_verify_aux_output_compatibility"):
        return  # a version whose older runner hands them on itself
    verify = _checking(VllmConfig._verify_aux_output_compatibility)
    # This replaces a method of vLLM on purpose: vLLM's own check rejects the older runner.
    VllmConfig._verify_aux_output_compatibility = verify  # type: ignore[method-assign]
    connect = _connecting(CPUModelRunner.initialize_kv_cache)
    # This replaces a method of vLLM on purpose: the older runner needs the collector.
    CPUModelRunner.initialize_kv_cache = connect  # type: ignore[method-assign]
    # This replaces a method of vLLM on purpose: the collector must know when a step begins.
    CPUModelRunner.execute_model = _beginning(CPUModelRunner.execute_model)  # type: ignore[method-assign]
    sample = _handing_on(CPUModelRunner.sample_tokens)
    # This replaces a method of vLLM on purpose: the output of a step must contain the experts.
    CPUModelRunner.sample_tokens = sample  # type: ignore[assignment, method-assign]


def _checking(vllms: Callable[..., object]) -> Callable[..., None]:
    def verify(self: VllmConfig) -> None:
        # everything but the runner, which is a property of the class and not of the object that is checked
        as_newer = SimpleNamespace(**{**vars(self), "use_v2_model_runner": True})
        vllms(as_newer)
        if self.aux_output_config.enabled and self.speculative_config is not None:
            raise ValueError(
                "--vllm-speculative-config must be left out with --use-rollout-routing-replay on a CPU, got it; which "
                "drafted tokens were rejected is not told here"
            )

    return verify


def _connecting(vllms: Callable[..., object]) -> Callable[..., None]:
    def initialize_kv_cache(self: _Runner, kv_cache_config: Any, *others: object, **more: object) -> None:
        vllms(self, kv_cache_config, *others, **more)
        if self.vllm_config.aux_output_config.enabled:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self.aux_output_connector = get_aux_output_connector(
                self.model, self.vllm_config, kv_cache_config
            )

    return initialize_kv_cache


def _beginning(vllms: Callable[..., T]) -> Callable[..., T]:
    def execute_model(self: _Runner, scheduler_output: SchedulerOutput, *others: object, **more: object) -> T:
        if hasattr(self, "aux_output_connector"):
            self.aux_output_connector.begin_step(scheduler_output.aux_output_connector_metadata)
            self.routed_step = scheduler_output.num_scheduled_tokens
        return vllms(self, scheduler_output, *others, **more)

    # `_let_older_runner` finds this attribute and does not wrap twice. Function types declare no such attribute.
    execute_model.wraps = vllms  # type: ignore[attr-defined]
    return execute_model


def _handing_on(vllms: Callable[..., Any]) -> Callable[..., object]:
    def sample_tokens(self: _Runner, *others: object, **more: object) -> object:
        output = vllms(self, *others, **more)
        if hasattr(self, "aux_output_connector") and output is not None:
            output.aux_output_connector_output = _step_rows(self, output)
        return output

    return sample_tokens


def _step_rows(runner: _Runner, output: ModelRunnerOutput) -> dict[str, object] | None:
    """What the collector has for the requests of a step, told as the newer runner tells it. Rows of a step lie in the
    order of its requests; without speculation (`_checking`) the older runner drops no token that it computed."""
    ids = output.req_ids
    computed = [runner.routed_step[name] for name in ids]
    step = SimpleNamespace(
        req_ids=ids,
        query_start_loc_np=np.cumsum([0, *computed]),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(ids)].copy(),
    )
    pending = runner.aux_output_connector.prepare_output(step)
    if pending is None:  # another rank of the engine has them
        return None
    sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
    pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
    rows: dict[str, object] | None = pending.process_output()
    return rows
