"""Makes a tiny random Qwen3 checkpoint with a character tokenizer, weight files from it, and an engine that serves
it."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from process_names import command_line
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slime.protocols import GenerateResult, WeightUpdate
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices
from vime.pool.control import request
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHARACTERS = "0123456789+-*/=().,:; abcdefghijklmnopqrstuvwxyz"
EOS_ID = SPECIAL.index("<|im_end|>")


def make_checkpoint(
    path: Path, *, seed: int = 0, tied: bool = True, layers: int = 2, hidden: int = 64
) -> Path:
    """Writes an HF checkpoint (config, safetensors, fast tokenizer) with random weights from `seed`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    fast.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=EOS_ID,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return path


def make_experts(path: Path, seed: int, *, layers: int = 2, experts: int = 8) -> Path:
    """Writes a checkpoint of Qwen3-MoE with the tokenizer of `make_checkpoint`. Its routers decide clearly."""
    make_checkpoint(path, seed=seed, layers=1)
    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(path).vocab_size,
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def publish_checkpoint(checkpoint: Path, directory: Path, version: int, *, checksums: bool) -> WeightUpdate:
    """Returns the update that a trainer with the weights of `checkpoint` publishes as `version`."""
    state = load_file(checkpoint / "model.safetensors")
    return FileChannel(directory).publish(whole_slices(state.items()), version, checksums=checksums)


def metric(url: str, key: str, name: str) -> float:
    """Returns the counter or gauge `name` of the engine at `url`."""
    _, page = request(url, key, "GET", "/metrics", timeout_s=30)
    lines = [line for line in page.decode().splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.split()[-1]) for line in lines)


def answered(url: str, key: str) -> float:
    """Returns the number of requests that the engine at `url` has answered."""
    return metric(url, key, "request_success_total")


class Stack:
    """A pool with one engine, and two sets of weights for it: the checkpoint's weights and other weights."""

    key = "test-key-0123456789"
    resident_at_start = 0

    def __init__(self, root: Path, *, starts_empty: bool = False) -> None:
        self.weight_dir = root / "weights"
        self.checkpoint = make_checkpoint(root / "first", seed=0)
        self.other = make_checkpoint(root / "second", seed=1)
        spec = VllmSpec(
            model_path=str(self.checkpoint),
            run_key=self.key,
            log_path=str(root / "engine.log"),
            weight_dir=str(self.weight_dir),
            start_timeout_s=240,
            top_tokens=64,
            keeps_cache=True,
            starts_empty=starts_empty,
        )
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool([spec], router, source=self, health_check_interval_s=5)
        self.parts: list[WeightUpdate] = []
        self.version = -1

    @property
    def control(self) -> VllmControl:
        return VllmControl(self.pool.engine_urls[0], self.key)

    def metric(self, name: str) -> float:
        """Returns the engine's own counter or gauge `name`."""
        return metric(self.control.url, self.key, name)

    def push(self, checkpoint: Path, *, checksums: bool = True) -> WeightUpdate:
        self.version += 1
        update = publish_checkpoint(checkpoint, self.weight_dir, self.version, checksums=checksums)
        self.publish(update)
        return update

    def publish(self, update: WeightUpdate) -> None:
        """Sends `update` to the pool, as a trainer does."""
        self.parts = [update]
        self.pool.publish(update.version)

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        future: Future[WeightUpdate | None] = Future()
        future.set_result(self.parts.pop() if self.parts else None)
        return future

    def weights_file(self) -> Future[WeightUpdate]:
        raise AssertionError("a file lasts: the pool has it")

    def generate(
        self, prompt: list[int], *, seed: int = 0, deadline_s: float = 60, **params: object
    ) -> GenerateResult:
        return self.generate_all([prompt], seed=seed, deadline_s=deadline_s, **params)[0]

    def generate_all(
        self, prompts: list[list[int]], *, seed: int = 0, deadline_s: float = 60, **params: object
    ) -> list[GenerateResult]:
        async def run() -> list[GenerateResult]:
            client = self.pool.client()
            sampling = {"temperature": 1.0, "max_new_tokens": 8, "stop_token_ids": [], **params}
            tasks = [
                client.generate(prompt, sampling, seed=seed + i, deadline_s=deadline_s)
                for i, prompt in enumerate(prompts)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                await client.close()

        return asyncio.run(run())


def check_first_weights(stack: Stack, prompt: list[int]) -> None:
    """Checks that an engine without weights answers a request only with the first weights that it gets."""
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(stack.generate, prompt)
        with pytest.raises(TimeoutError):
            early.result(timeout=1)
        update = stack.push(stack.checkpoint)
        found = early.result()
    assert found.weight_versions == [update.version]
    expected = hf_log_probs(stack.checkpoint, prompt, found.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-4, rtol=0)


def server_of(url: str) -> psutil.Process:
    """Returns the server that listens at `url`. Other test files' engines may have the same parent process."""
    port = f"--port {urlsplit(url).port} "
    (found,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if port in command_line(process) + " " and "supervise" not in command_line(process)
    )
    return found


def engine_core_of(url: str) -> psutil.Process:
    """Returns the process of the only engine core of the server at `url`."""
    (found,) = (p for p in server_of(url).children(recursive=True) if "EngineCore" in command_line(p))
    return found


def status(base: str, method: str, path: str, key: str | None = None, body: object = None) -> int:
    """Sends one request and returns its HTTP status."""
    address = urlsplit(base)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, address.path + path, None if body is None else json.dumps(body), headers)
        return connection.getresponse().status
    finally:
        connection.close()


@functools.cache
def hf_model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def hf_log_probs(
    checkpoint: Path, prompt: list[int], response: list[int], temperature: float
) -> torch.Tensor:
    model = hf_model(checkpoint)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
