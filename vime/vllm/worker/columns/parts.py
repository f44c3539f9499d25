"""Reads the tokens of answers that vLLM still generates, from vLLM's records of its requests.

A request for final answers only makes no output before its end, which saves time in each step. A part costs time only
when it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.vllm.worker.columns.token_versions import Span, attach, version_spans

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class PartReader:
    """Reads the new tokens of the requests `names`."""

    def __init__(self, engine: AsyncLLM, names: list[str]) -> None:
        self._engine, self._indices = engine, {name: index for index, name in enumerate(names)}
        self._known = [0] * len(names)

    def read(self) -> list[tuple[int, RequestOutput]]:
        """Returns the index of each running request that has new tokens, and an output with only these tokens."""
        from vllm.outputs import RequestOutput

        found = []
        for state in self._engine.output_processor.request_states.values():
            index = self._indices.get(state.external_req_id)
            if index is None or state.detokenizer is None:
                continue
            completion = state._new_completion_output([], None, None)
            known, end = self._known[index], len(completion.token_ids)
            if end == known:
                continue
            spans = [span for span in version_spans(completion) if span.end > known]
            completion.token_ids = completion.token_ids[known:end]
            if completion.logprobs is not None:
                completion.logprobs = completion.logprobs[known:end]
            attach(completion, [Span(s.version, max(s.start - known, 0), s.end - known) for s in spans])
            self._known[index] = end
            prompt = state.prompt_token_ids
            found.append((index, RequestOutput(state.request_id, None, prompt, None, [completion], False)))
        return found
