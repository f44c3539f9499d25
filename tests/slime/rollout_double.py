"""Provides shared parts of the data and rollout tests: a byte tokenizer, complete arguments, and an engine double for
faults.

`EngineDouble` replaces the served model only where a test must cause a fault or an order of events (stragglers,
timeouts, aborts, refused prompts). End-to-end tests cover the real engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.config import Config
from slime.config.sections.rollout import RolloutConfig
from slime.protocols import AnswerParts, GenerateResult
from slime.rollout.state import GenerateState
from slime.types import Sample, SampleGroup

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


_UNSET = """
prompt_data label_key rollout_max_context_len rollout_max_prompt_len rollout_stop rollout_stop_token_ids
over_sampling_batch_size dynamic_sampling_filter_path custom_generate_function_path buffer_filter_path
rollout_sample_filter_path rollout_all_samples_process_path save load eval_prompt_data eval_config eval_input_key
eval_label_key eval_tool_key eval_temperature eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len
eval_min_new_tokens eval_max_context_len reward_key eval_reward_key rm_type rm_url custom_rm_path
log_reward_category hf_checkpoint prompt_data_weights curriculum run_dir multimodal_keys
"""
_OFF = """
rollout_shuffle apply_chat_template disable_rollout_global_dataset partial_rollout trust_remote_code
mask_offpolicy_in_partial_rollout rollout_skip_special_tokens group_rm log_passrate log_multi_turn
log_correct_samples use_rollout_routing_replay use_score_centering buffer_sort_by_staleness
"""
QUEUE = ("rollout_data_", "rollout_queue_", "rollout_storage_", "rollout_io_")
"""Beginnings of the flags of --rollout-data-transport straw."""


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per byte (ids 0-255) and then the special tokens. Every text has a known
    length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_args(**overrides: Any) -> SimpleNamespace:
    """Returns every flag that the data source and the rollout read, at its default, for a batch of 2 prompts x 2
    samples.
    """
    defaults: dict[str, Any] = dict.fromkeys(_UNSET.split())
    defaults |= dict.fromkeys(_OFF.split(), False)
    defaults |= {
        "input_key": "prompt",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template_kwargs": {},
        "rollout_sample_hook_path": [],
        "rollout_seed": 42,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "n_samples_per_eval_prompt": 1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 8,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "server_concurrency": 512,
        "rollout_deadline_s": 5.0,
        "reward_deadline_s": 60.0,
        "loss_type": "policy_loss",
        "rollout_function_path": "slime.rollout.vllm_rollout.generate_rollout",
        "max_staleness": 0,
        "stale_samples": "drop",
        "loss_mask_type": "qwen",
        "replay_kept_tokens": 0,
        "score_centering_top_k": 128,
        "session_host": "127.0.0.1",
        "session_deadline_s": 3600.0,
        "failed_samples": "drop",
        **{field.name: field.default for field in fields(RolloutConfig) if field.name.startswith(QUEUE)},
        "rollout_snapshot_s": 60.0,
        "overwrite": False,
    }
    unknown = set(overrides) - set(defaults)
    assert not unknown, f"not a flag of make_args: {unknown}"
    return SimpleNamespace(**{**defaults, **overrides})


class EngineDouble:
    """Generates the letters a, b, c, ... (one token each) and an end marker. It is deterministic and causes faults on
    request.

    The prompt selects the behaviour: "len=N" is the number of letters (default 3), "slow" waits for an abort after
    two letters, "part=N" reports the first N letters before it waits, "hold=X" waits until X is in `released`, "stuck"
    ignores deadline and abort, "late" misses its deadline, "refuse" is not accepted. `version` is the weight version.
    `calls` records (prompt text, sampling params, seed) for each request.
    """

    streams = False
    has_parts = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.version = 0
        self.calls: list[tuple[str, dict[str, Any], int]] = []
        self.aborts = self.running = self.most_running = 0
        self.closed = False
        self.released: set[str] = set()
        self._abort = asyncio.Event()

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int] = MappingProxyType({}),
        session: str | None = None,
        parts: AnswerParts | None = None,
    ) -> GenerateResult:
        text = self.tokenizer.decode(token_ids)
        if parts is not None and "part=" in text:
            for index in range(int(text.split("part=")[1][0])):
                parts.take(index, self._result("abcdefgh"[index], "abort", len(token_ids), end=False))
        self.calls.append((text, sampling_params, seed))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(text, sampling_params, len(token_ids), deadline_s)
        finally:
            self.running -= 1

    async def _answer(
        self, text: str, params: dict[str, Any], prompt_tokens: int, deadline_s: float
    ) -> GenerateResult:
        if "refuse" in text:
            raise ValueError("the engine refused the prompt")
        if "late" in text:
            raise TimeoutError(f"no answer within {deadline_s} s: connection refused")
        if "stuck" in text:
            await asyncio.Event().wait()
        done = len(text) - len(text.rstrip("abcdefgh")) if ":" in text else 0
        length = int(text.split("len=")[1][0]) if "len=" in text else 3
        if "slow" in text and done == 0:
            await self._abort.wait()
            return self._result("abcdefgh"[:2], "abort", prompt_tokens, end=False)
        began = self.version
        while "hold=" in text and text.split("hold=")[1][0] not in self.released:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)
        letters = "abcdefgh"[done:length]
        if len(letters) + 1 > params["max_new_tokens"]:
            return self._result(letters[: params["max_new_tokens"]], "length", prompt_tokens, end=False)
        return self._result(letters, "stop", prompt_tokens, end=True, began=began)

    def _result(
        self, letters: str, reason: Any, prompt_tokens: int, *, end: bool, began: int | None = None
    ) -> GenerateResult:
        text = letters + ("<|im_end|>" if end else "")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        versions = sorted({self.version if began is None else began, self.version})
        log_probs = [-0.1 * (i + 1) for i in range(len(ids))]
        return GenerateResult(ids, log_probs, text, reason, versions, prompt_tokens, prompt_tokens // 2)

    async def abort_all(self) -> None:
        self.aborts += 1
        self._abort.set()
        await asyncio.sleep(0)
        self._abort.clear()

    async def close(self) -> None:
        self.closed = True


STATES: list[GenerateState] = []
"""Open states of `make_state`."""


def make_state(
    args: SimpleNamespace, tokenizer: PreTrainedTokenizerFast | None = None, **facts: Any
) -> GenerateState:
    """Returns a state with an engine double, which functions reach as in the manager. It closes with the test."""
    tokenizer = tokenizer or make_tokenizer()
    state = GenerateState(Config.from_args(args), EngineDouble(tokenizer), tokenizer, hook_args=args, **facts)
    STATES.append(state.enter())
    return state


class ListSource:
    """A data source over given prompts, which uses each prompt once and has a plain list as its buffer."""

    def __init__(self, args: SimpleNamespace, prompts: list[str]) -> None:
        self.args, self.prompts = args, prompts
        self.buffer: list[SampleGroup] = []
        self.drawn = 0

    def get_samples(self, num_groups: int) -> list[SampleGroup]:
        groups, self.buffer = self.buffer[:num_groups], self.buffer[num_groups:]
        while len(groups) < num_groups and self.drawn < len(self.prompts):
            n, g = self.args.n_samples_per_prompt, self.drawn
            prompt = self.prompts[g]
            groups.append([Sample(prompt=prompt, label="", index=g * n + i, group_index=g) for i in range(n)])
            self.drawn += 1
        return groups

    def add_samples(self, groups: list[SampleGroup]) -> None:
        self.buffer += groups

    def __len__(self) -> int:
        return len(self.prompts)
