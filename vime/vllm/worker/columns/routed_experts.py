"""Reads the experts to which the engine sent each token from its answers (--use-rollout-routing-replay).

vLLM collects the experts (--enable-return-routed-experts) and keeps them with its prefix cache, so the tokens of a
cached prompt have experts, too. Only vLLM's newer model runner returns them, and on CPUs that runner needs a Triton for
CPUs. So the worker on CPUs returns them for the older runner (vime.vllm.cpu.worker), and vLLM's check accepts that
runner (`for_the_older_runner`). Only requests for the column get experts (see producers). Evaluations do
not request them.

Shapes: N tokens of prompt and response, L layers of the model, K experts per token. The last token of a response is
never computed, so the rows are [N - 1, L, K]. A layer without experts has zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.protocols import Arrays

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import ModelRunnerOutput

FLAG = "--enable-return-routed-experts"


def check_rows(column: Arrays | None, *, tokens: int, start: int) -> None:
    """Checks that an answer's column has the experts of the tokens [start, tokens - 1).

    The array must be unsigned [tokens - 1 - start, L, K].

    Raises ValueError if the answer has no experts, if they are not such an array, and if the rows do not match the
    tokens.
    """
    if column is None:
        raise ValueError(
            f"the engine must give the experts of each token, got none for {tokens} tokens; check that it runs "
            f"with {FLAG}"
        )
    rows = column[0]
    if rows.ndim != 3 or rows.dtype.kind != "u":
        raise ValueError(
            f"the engine must give experts as unsigned [tokens, layers, k], got {rows.dtype} {list(rows.shape)}"
        )
    if len(rows) != tokens - 1 - start:
        raise ValueError(
            f"the engine must give one row of experts per token that it computed, got {len(rows)} for tokens "
            f"[{start}, {tokens - 1})"
        )


def for_the_older_runner(vllms: Callable[..., object]) -> Callable[..., None]:
    """Wraps vLLM's check of a configuration so that it also accepts the older model runner."""

    def verify(self: VllmConfig) -> None:
        # everything but the runner, which is a property of the class and not of the checked object
        as_newer = SimpleNamespace(**{**vars(self), "use_v2_model_runner": True})
        vllms(as_newer)
        if self.aux_output_config.enabled and self.speculative_config is not None:
            raise ValueError(
                "--vllm-speculative-config must be left out with --use-rollout-routing-replay on a CPU, got it; "
                "vLLM does not report which draft tokens it rejected there"
            )

    return verify


def step_rows(
    collector: Any, runner: Any, scheduled: dict[str, int], output: ModelRunnerOutput
) -> dict[str, object] | None:
    """Returns the `collector`'s rows for a step's requests, in the form of the newer runner.

    `scheduled` has the number of tokens per request in that step. Rows of a step are in the order of its requests.
    Without speculation, which `for_the_older_runner` refuses, the older `runner` drops no token that it computed.
    """
    ids = output.req_ids
    computed = [scheduled[name] for name in ids]
    step = SimpleNamespace(
        req_ids=ids,
        query_start_loc_np=np.cumsum([0, *computed]),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(ids)].copy(),
    )
    pending = collector.prepare_output(step)
    if pending is None:  # another rank of the engine has the rows
        return None
    sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
    pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
    rows: dict[str, object] | None = pending.process_output()
    return rows
