"""A real vLLM engine behind a real router that serves the tiny model, and rollouts with it in this process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.tokenizer import load_tokenizer
from slime.hooks import load_function
from slime.peers import http
from slime.protocols import RolloutEngine, WeightUpdate
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.state import GenerateState
from slime.rollout.vllm_rollout import generate_rollout
from slime.rules.resolve import resolve
from slime.types import Sample
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices
from vime.pool.router import RouterSpec
from vime.testing.tiny_model import write_tiny_model
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

START_S = 300.0
"""Most seconds until the engine serves. It takes about 15 s on a quiet CPU core."""
_HIDDEN = ("own_servers", "frozen_engines")


class TinyEngine:
    """An engine with the tiny model. `update` brings other weights, as a trainer does."""

    def __init__(self, root: Path) -> None:
        self.root, self.version = root, -1
        self.model = write_tiny_model(root / "model-0")
        """The Hugging Face folder of the weights that the engine serves."""
        key = secrets.token_urlsafe(32)
        spec = VllmSpec(
            model_path=str(self.model),
            run_key=key,
            log_path=str(root / "engine.log"),
            weight_dir=str(root / "weights"),
            start_timeout_s=START_S,
        )
        router = RouterSpec(run_key=key, log_path=str(root / "router.log"))
        self._update: WeightUpdate | None = None
        self._pool = VllmEnginePool([spec], router, source=self, health_check_interval_s=5)

    def start(self) -> TinyEngine:
        """Starts the processes and sends the first weights, as version 0."""
        self._pool.start()
        own = self._pool.facts["own_servers"]
        assert isinstance(own, Sequence)
        http.set_own_servers(*(http.OwnServers(**fields) for fields in own))
        self._send(self.model)
        return self

    def stop(self) -> None:
        http.set_own_servers()
        self._pool.stop()

    @property
    def url(self) -> str:
        """Returns the address of the engine, which has the OpenAI API."""
        return self._pool.engine_urls[0]

    def update(self) -> int:
        """Brings other random weights to the engine, and returns their version."""
        self.model = write_tiny_model(self.root / f"model-{self.version + 1}", seed=self.version + 1)
        return self._send(self.model)

    def rollout(
        self, rows: Sequence[Mapping[str, object]], *, samples_per_prompt: int = 1, **flags: object
    ) -> list[Sample]:
        """Returns the samples of one rollout, which runs in this process with the functions of a run.

        `rows` are the lines of a prompt file, with `prompt` and `label`. `flags` are flags of `vime train`.
        """
        data = self.root / "rows.jsonl"
        data.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
        config = self._config(data, len(rows), samples_per_prompt, flags)
        facts = {name: value for name, value in self._pool.facts.items() if name not in _HIDDEN}
        hooks = Hooks(config, **facts)
        tokenizer = load_tokenizer(str(self.model), trust_remote_code=False)
        client: RolloutEngine = self._pool.client()
        parser = str(facts["chat_parser_path"])
        state = GenerateState(
            config, client, tokenizer, hook_args=hooks.args, chat_parser_path=parser
        ).enter()
        try:
            source = load_function(config.data.data_source_path, "--data-source-path")(hooks.args)
            made = generate_rollout(hooks.args, 0, source)
        finally:
            state.close()
        assert isinstance(made, RolloutFnTrainOutput)
        return [sample for group in made.samples for entry in group for sample in _flat(entry)]

    def log_probs(self, tokens: Sequence[int], response_length: int) -> list[float]:
        """Returns the log-probs of the last `response_length` tokens under the engine's weights, by transformers."""
        with torch.no_grad():
            logits = _load(self.model)(torch.tensor([list(tokens)])).logits[0, -response_length - 1 : -1]
        table = torch.log_softmax(logits, dim=-1)
        found: list[float] = table.gather(-1, torch.tensor(tokens[-response_length:])[:, None])[:, 0].tolist()
        return found

    def _config(self, data: Path, prompts: int, samples: int, flags: Mapping[str, object]) -> Config:
        settings: dict[str, object] = {
            **{
                "hf_checkpoint": str(self.model),
                "device": "cpu",
                "actor_num_gpus_per_node": 1,
                "colocate": True,
            },
            **{
                "prompt_data": str(data),
                "input_key": "prompt",
                "label_key": "label",
                "apply_chat_template": True,
            },
            **{
                "rollout_batch_size": prompts,
                "n_samples_per_prompt": samples,
                "rollout_max_response_len": 32,
            },
            **{"num_rollout": 1, "run_dir": str(self.root / "run"), "rollout_deadline_s": 120.0},
        }
        if not {"custom_rm_path", "rm_type"} & set(flags):
            settings["rm_type"] = "zero"
        return resolve({**settings, **flags})

    def _send(self, folder: Path) -> int:
        self.version += 1
        state = load_file(folder / "model.safetensors")
        slices = whole_slices(state.items())
        self._update = FileChannel(self.root / "weights").publish(slices, self.version, checksums=True)
        self._pool.publish(self.version)
        return self.version

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        """Returns the next part of an update for the pool: the whole update, and then None."""
        future: Future[WeightUpdate | None] = Future()
        future.set_result(self._update)
        self._update = None
        return future

    def weights_file(self) -> Future[WeightUpdate]:
        """Raises AssertionError, because the pool calls this function only for updates that do not last, and files
        last."""
        raise AssertionError("files of weights last")


def _flat(entry: Sample | list[Sample]) -> list[Sample]:
    """Returns the samples of a trajectory. A generate function may return several."""
    return entry if isinstance(entry, list) else [entry]


@lru_cache(maxsize=4)
def _load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model
