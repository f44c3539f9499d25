"""Estimates an engine's memory per GPU from shapes: weights, KV cache of requests, and whether a GPU of a given size is
enough.

slime.plan.card_phases estimates the memory that an engine shares with a trainer. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from slime.config import Config
from slime.models.decoder import Hf
from slime.plan.card_phases import engine_weights, engines_besides
from slime.plan.fit import Need
from slime.plan.memory_decision import TOO_SMALL, gpu
from slime.plan.memory_estimate import Item
from slime.plan.model_shape import Shape
from slime.plan.units import BYTES, GIB, amount
from slime.tracking.phases import GENERATING, LOADING
from vime.pool.engine_flags import engine_tensor_parallel
from vime.vllm.server import SCORED_TOKENS

_SAMPLED = 22
"""Bytes per request and token of the vocabulary when vLLM samples: logits in 16 bits, and in float32 the logits, a
buffer of top-k and top-p, log-probs, probabilities and noise."""
_OUTSIDE_TORCH = 0.13 * GIB
"""Memory of an engine outside PyTorch's allocator that vLLM subtracts from its share: whole_qwen3_30b_h200."""
_LARGE = 65 * GIB
"""Memory from which vLLM's server has the larger of its defaults for the sizes of a step, but not on an A100. vLLM
compares 70 GiB with the whole GPU. No GPU has 65 to 70 GiB, and a launcher's choice fills a part of a GPU."""


def engine_memory(c: Config, shape: Shape) -> list[Item]:
    """Returns the bytes on one GPU of an engine: weights, and the KV cache of the requests that may run at once."""
    token, state, length = _token(c, shape), _state(c, shape), _length(c)
    items = [engine_weights(c, shape), token, *([state] if state.bytes else [])]
    if length is not None:
        how = f"{_requests(c)} requests x {length} tokens, prompts left out, if all ran to the end at once"
        how += ", with their states" if state.bytes else ""
        items.append(Item("KV cache", (token.bytes * length + state.bytes) * _requests(c), how))
    return items


def scored_logits(c: Config, shape: Shape) -> Item:
    """Returns the bytes of a scoring pass's logits, with two copies in float32. They are outside the engine's memory
    share."""
    size = BYTES.get(c.engine.engine_facts.dtype or c.megatron.params_dtype, 2) + 8
    tokens = c.engine.backend_args.get("max_num_batched_tokens") or SCORED_TOKENS
    return Item("logits", tokens * shape.vocab * size, f"{tokens} tokens x {shape.vocab} x {size} B")


def activations(c: Config, shape: Shape, device_bytes: float) -> float:
    """Returns the bytes of an engine's share that vLLM keeps free for its largest step, which it runs once at its
    start.

    The tensors follow from vLLM's sampler. The sum was measured for one model, Qwen3-30B-A3B (whole_qwen3_30b_h200). It
    has no term for the layers' own activations, which are smaller with the usual sizes of a step.
    """
    if c.engine.rollout_backend != "vllm":
        return 0.0
    flags = c.engine.backend_args
    sequences, tokens = usual_step(device_bytes, c.cluster.gpu)
    size = BYTES.get(c.engine.engine_facts.dtype or c.megatron.params_dtype, 2)
    sequences, tokens = flags.get("max_num_seqs") or sequences, flags.get("max_num_batched_tokens") or tokens
    return step_bytes(shape, sequences, tokens, size)


def usual_step(device_bytes: float, gpu: str | None) -> tuple[int, int]:
    """Returns the largest numbers of requests and tokens in a step of vLLM's server by default, on a GPU of
    `device_bytes` with a name of `slime.hardware` or None (vllm/engine/arg_utils.py)."""
    return (1024, 8192) if device_bytes >= _LARGE and "a100" not in (gpu or "") else (256, 2048)


def step_bytes(shape: Shape, sequences: int, tokens: int, size: int = 2) -> float:
    """Returns the bytes of a step with `sequences` requests and `tokens` tokens, with weights of `size` bytes.

    bytes = min(sequences, tokens) * vocab * 22 + 2 * tokens * hidden * size
    """
    sampled = min(sequences, tokens) * shape.vocab * (_SAMPLED - 2 + size)
    return sampled + 2 * tokens * shape.hidden * size + _OUTSIDE_TORCH


def engine_verdict(c: Config, hf: Hf, device_bytes: float) -> str:
    """Returns a sentence: whether an engine fits a GPU of `device_bytes`, and the number of requests that fit at a
    time.

    If the bytes of the KV cache are not given, they are the engine's share minus the weights and `activations`. A cache
    for fewer requests than may run is no error, because the others wait. But vLLM does not start without memory for one
    sequence of --vllm-max-model-len.
    """
    shape = Shape.of(hf)
    weights, token, state = engine_weights(c, shape).bytes, _token(c, shape).bytes, _state(c, shape).bytes
    more_gpus = f"--rollout-num-gpus-per-engine (now {c.cluster.rollout_num_gpus_per_engine})"
    several = c.cluster.rollout_engines_per_gpu
    if cache_bytes := c.engine.engine_facts.cache_bytes:
        besides = engines_besides(c)
        free, short = float(cache_bytes), several * (weights + cache_bytes) + besides - device_bytes
        parts = [f"{amount(weights)} of weights", f"{amount(cache_bytes)} of KV cache"]
        parts[-1] += f" for each of {several} engines" if several > 1 else ""
        composition = f"{', '.join(parts)}, {amount(besides)} besides"
        bound = f"--vllm-kv-cache-memory-bytes (now {cache_bytes})"
        change = f"lower {bound} or raise {more_gpus}"
        if several > 1:
            change = f"lower {bound} or --rollout-engines-per-gpu (now {several})"
    else:
        share, step = c.engine.engine_facts.memory_share, activations(c, shape, device_bytes)
        free = share * device_bytes - weights - step
        short = -free
        in_share = f"{amount(weights)} of weights" + (f" and {amount(step)} of activations" if step else "")
        composition = f"{in_share} in {amount(share * device_bytes)}, {share:g} of it"
        bound = f"--vllm-gpu-memory-utilization (now {share:g})"
        change = f"raise {bound} or {more_gpus}"
    if short > 0:
        return f"{TOO_SMALL} {gpu(device_bytes)}: {composition}, {amount(short)} too much; {change}"
    if (needed := sequence_bytes(c, shape, hf)) > free:
        more = f"raise {bound}" if several > 1 else f"raise {bound} or {more_gpus}"
        return (
            f"{TOO_SMALL} {gpu(device_bytes)}: {composition}, {amount(free)} for the KV cache, but one sequence of "
            f"{_sequence_tokens(c, hf)} tokens needs {amount(needed)}; {more}, or set a lower --vllm-max-model-len"
        )
    return f"fits {gpu(device_bytes)}: {composition}, {_at_a_time(c, free, token, state)}"


def sequence_bytes(c: Config, shape: Shape, hf: Hf) -> float:
    """Returns the bytes of the KV cache that a sequence of --vllm-max-model-len tokens needs."""
    return _token(c, shape).bytes * _sequence_tokens(c, hf) + _state(c, shape).bytes


def _sequence_tokens(c: Config, hf: Hf) -> int:
    tokens: int = c.engine.backend_args.get("max_model_len") or hf.get("max_position_embeddings") or 0
    return tokens


def card_need(c: Config, hf: Hf, device_bytes: float) -> list[Need]:
    """Returns the memory of a GPU that only engines use, if the bytes of their KV cache are given. Otherwise an engine
    takes its share of the GPU."""
    cache_bytes = c.engine.engine_facts.cache_bytes
    if c.cluster.colocate or not cache_bytes:
        return []
    each = engine_weights(c, Shape.of(hf)).bytes + cache_bytes
    whole = c.cluster.rollout_engines_per_gpu * each + engines_besides(c)
    return [Need("a GPU", "while engines generate", GENERATING, whole, device_bytes, whole)]


def engine_need(c: Config, hf: Hf, device_bytes: float) -> Need:
    """Returns the memory that an engine needs to start: its weights, its activations, and the KV cache for one
    sequence."""
    shape, facts = Shape.of(hf), c.engine.engine_facts
    weights, one = engine_weights(c, shape).bytes, sequence_bytes(c, shape, hf)
    if cache_bytes := facts.cache_bytes:
        return Need("an engine's KV cache", "when an engine starts", LOADING, one, float(cache_bytes), one)
    limit, whole = facts.memory_share * device_bytes, weights + activations(c, shape, device_bytes) + one
    return Need("an engine's share", "when an engine starts", LOADING, whole, limit, weights + one)


def _at_a_time(c: Config, free: float, token: float, state: float) -> str:
    """Returns a phrase with the number of requests of full length that the KV cache holds."""
    requests, length = _requests(c), _length(c)
    held = f"at most {amount(free)} for the KV cache"
    if length is None:
        return f"{held}, {free / token:.0f} tokens"
    fitting = int(free / (token * length + state))
    if fitting >= requests:
        return f"{held}, enough for {requests} requests of {length} tokens"
    return f"{held}, {fitting} of {requests} requests of {length} tokens at a time, the others wait"


def _requests(c: Config) -> int:
    """Returns the number of requests that one engine may run at once."""
    submitted = c.rollout.over_sampling_batch_size
    share = -(-submitted * c.data.n_samples_per_prompt // max(c.num_engines, 1))
    return min(c.engine.server_concurrency, share)


def _length(c: Config) -> int | None:
    """Returns the maximum number of tokens of a request. Without a limit on the context, prompts are not counted."""
    return c.rollout.rollout_max_context_len or c.rollout.rollout_max_response_len


def _token(c: Config, shape: Shape) -> Item:
    """Returns the bytes of keys and values per token. Tensor-parallel ranks and pipeline stages share them.

    Ranks beyond the number of key-value heads hold copies. Each tensor-parallel rank holds whole latent vectors.
    """
    size = BYTES.get(c.engine.engine_facts.dtype or c.megatron.params_dtype, 2)
    tp, stages = min(engine_tensor_parallel(c), shape.groups), c.engine.engine_facts.pipeline_parallel_size
    whole = shape.cache_whole
    if whole == shape.cache:
        tp = 1
    split = f"TP {tp}" + (f" / PP {stages}" if stages > 1 else "")
    ahead = shape.predictions if c.engine.engine_facts.drafts else ()
    layers, cache = shape.layers + len(ahead), shape.cache + sum(kind.attention.cache for kind in ahead)
    how = f"{layers} layers x {cache / layers:g} x {size} B / {split}"
    elements = (cache - whole) / tp + whole
    return Item("KV cache per token", elements * size / stages, how)


def _state(c: Config, shape: Shape) -> Item:
    """Returns the bytes of a request's state in layers whose state has a fixed size, such as gated delta nets.

    The state of the newest token is kept, and for the prefix cache also the state of an earlier token. Tensor-parallel
    ranks and pipeline stages share it.
    """
    flags = c.engine.backend_args
    usual = c.engine.engine_facts.dtype or c.megatron.params_dtype
    newest = _bytes(flags.get("mamba_cache_dtype"), BYTES.get(usual, 2))
    state = _bytes(flags.get("mamba_ssm_cache_dtype"), BYTES.get(shape.state_dtype, newest))
    copies = 1 if flags.get("enable_prefix_caching") is False else 2
    parts = engine_tensor_parallel(c) * c.engine.engine_facts.pipeline_parallel_size
    layers = sum(kind.attention.state > 0 for kind in shape.kinds)
    each = max(layers, 1)
    how = (
        f"{copies} x {layers} layers x ({shape.state / each:g} x {state} B + {shape.newest / each:g} x {newest} B) / "
        f"{parts} GPUs"
    )
    return Item("state per request", copies * (shape.state * state + shape.newest * newest) / parts, how)


def _bytes(dtype: str | None, usual: int) -> int:
    """Returns the bytes of a dtype by vLLM's name, or `usual` for None and "auto"."""
    return BYTES.get(dtype or "auto", usual)
