"""`vime plan`: what a set of flags means, worked out and checked. Starts nothing, allocates nothing.

Memory figures are estimates from shapes: weights, gradients, optimizer states and what a forward keeps for
the backward. They leave out the framework's own buffers and fragmentation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config import Config
from slime.hf_config import read_hf_config
from slime.operators import decide, headline
from vime.engine.flags import engine_settings, engine_tensor_parallel, parse_config
from vime.engine.server import EngineServer, EngineSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """The numbers of a dense decoder that memory depends on; `q` and `kv` are heads times head size."""

    layers: int
    hidden: int
    ffn: int
    q: int
    kv: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, hf: dict[str, Any]) -> Shape:
        heads = hf["num_attention_heads"]
        head = hf.get("head_dim") or hf["hidden_size"] // heads
        return cls(
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            ffn=hf["intermediate_size"],
            q=heads * head,
            kv=hf.get("num_key_value_heads", heads) * head,
            vocab=hf["vocab_size"],
            tied=hf.get("tie_word_embeddings", False),
        )

    @property
    def layer_params(self) -> int:
        """Matrices of one layer: q, k, v, o and the gated MLP. Norms and biases are about a thousandth."""
        return self.hidden * (2 * self.q + 2 * self.kv) + 3 * self.hidden * self.ffn

    @property
    def params(self) -> int:
        """Matrices of the whole model."""
        return self.layers * self.layer_params + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Item:
    """One line of a memory estimate: how the number of bytes comes about."""

    name: str
    bytes: float
    arithmetic: str


def trainer_memory(c: Config, shape: Shape) -> list[Item]:
    """Bytes on one trainer rank, of the pipeline stage with the most parameters. Mixed precision keeps fp32 main
    weights beside Adam's two fp32 moments."""
    size, tp = BYTES[c.params_dtype], c.tensor_model_parallel_size
    params, share = stage_params(c, shape)
    grad = 4 if c.megatron.overrides.get("grad_reduce_in_fp32", True) else size
    main = 0 if c.params_dtype == "float32" else 4
    state = main + (8 if c.optimizer == "adam" else 4)
    shards = c.data_parallel_size * c.context_parallel_size if c.use_distributed_optimizer else 1
    items = [
        Item("weights", params / tp * size, f"{share} x {size} B / TP {tp}"),
        Item("gradients", params / tp * grad, f"{share} x {grad} B / TP {tp}"),
        Item("optimizer", params / tp * state / shards, f"{share} x {state} B / TP {tp} / {shards} shards"),
    ]
    if c.needs_reference:
        items.append(Item("reference", params / tp * size, f"{share} x {size} B / TP {tp}"))
    if (tokens := micro_batch_tokens(c)) is not None:
        items.append(activation_memory(c, shape, tokens))
    if c.rlk_fast != "off" and c.device == "cuda":
        workspace = c.rl_kernel_workspace_mib * 2**20
        items.append(Item("operators", workspace, "--rl-kernel-workspace-mib, at most, while one runs"))
    return items


def stage_params(c: Config, shape: Shape) -> tuple[int, str]:
    """Parameters of the largest pipeline stage, and how to say that. A tied head is a copy on the last stage."""
    layers = c.megatron.layers_of_stages(shape.layers)
    if len(layers) == 1:
        return shape.params, count(shape.params)
    at_ends = shape.vocab * shape.hidden
    sizes = [n * shape.layer_params + at_ends * (i in (0, len(layers) - 1)) for i, n in enumerate(layers)]
    largest = max(range(len(layers)), key=sizes.__getitem__)
    return sizes[largest], f"{count(sizes[largest])} of stage {largest}"


def micro_batch_tokens(c: Config) -> int | None:
    """The most tokens of one micro-batch on one rank; None when no length is bounded."""
    if c.use_dynamic_batch_size:
        return c.max_tokens_per_gpu
    longest = c.rollout_max_context_len or _sum(c.rollout_max_prompt_len, c.rollout_max_response_len)
    return None if longest is None else longest * c.micro_batch_size // c.context_parallel_size


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def activation_memory(c: Config, shape: Shape, tokens: int) -> Item:
    """What the forward keeps for the backward, per token and layer.

    Norm inputs and outputs: 4 H. Attention (q, k, v, what norm and rotation keep, the output): 4 q + 4 kv.
    Gated MLP: 3 F. The last two are split over tensor parallelism, the first too with --sequence-parallel.
    With full recomputation only the layer inputs stay, plus one layer while it is recomputed. The first of P pipeline
    stages keeps P micro-batches of its layers. Of C context-parallel ranks each keeps the keys and values that its two
    runs of a sequence see: together all of the sequence and, on average, half a rank's share more.
    """
    size, tp = BYTES[c.params_dtype], c.tensor_model_parallel_size
    layers = c.megatron.layers_of_stages(shape.layers)[0] * c.pipeline_model_parallel_size
    split = tp if c.sequence_parallel else 1
    cp = c.context_parallel_size
    gathered = 2 * shape.kv * (cp + 0.5) if cp > 1 else 0
    layer = 4 * shape.hidden / split + (4 * shape.q + 4 * shape.kv + gathered + 3 * shape.ffn) / tp
    if c.megatron.overrides.get("recompute_granularity") == "full":
        total = tokens * size * (layers * shape.hidden / split + layer)
        kept = f"{shape.hidden / split:g}"
        how = f"{count(tokens)} tokens x {size} B x ({layers} layers x {kept} + {layer:.0f} of one layer)"
    else:
        total = tokens * size * layers * layer
        how = f"{count(tokens)} tokens x {size} B x {layers} layers x {layer:.0f}"
    return Item("activations", total, how)


def engine_memory(c: Config, shape: Shape) -> list[Item]:
    """Bytes on one GPU of an engine: weights, and the KV cache of the requests that may run at once."""
    size = BYTES.get(c.engine.vllm_args.get("dtype", c.params_dtype), 2)
    tp = engine_tensor_parallel(c)
    token = 2 * shape.layers * shape.kv * size / tp
    items = [
        Item("weights", shape.params * size / tp, f"{count(shape.params)} x {size} B / TP {tp}"),
        Item("KV cache per token", token, f"2 x {shape.layers} layers x {shape.kv} x {size} B / TP {tp}"),
    ]
    length = c.rollout_max_context_len or c.rollout_max_response_len
    share = -(-c.over_sampling_batch_size * c.n_samples_per_prompt // max(c.num_engines, 1))
    requests = min(c.vllm_server_concurrency, share)
    if length is not None:
        how = f"{requests} requests x {length} tokens, prompts left out, if all ran to the end at once"
        items.append(Item("KV cache", token * requests * length, how))
    return items


def topology(c: Config) -> Iterator[str]:
    """Who runs where, in how many processes."""
    trains, generates = not c.debug_rollout_only, c.num_engines > 0
    if trains:
        sizes = {
            "tensor parallel": c.tensor_model_parallel_size,
            "context parallel": c.context_parallel_size,
            "data parallel": c.data_parallel_size,
            "pipeline parallel": c.pipeline_model_parallel_size,
        }
        usual = ("tensor parallel", "data parallel")
        ways = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1 or name in usual)
        yield (
            f"trainer   {plural(c.actor_num_nodes, 'node')} x {c.actor_num_gpus_per_node} = "
            f"{plural(c.world_size, 'rank')}: {ways}"
        )
    if generates:
        each = c.rollout_num_gpus_per_engine
        yield f"engines   {plural(c.num_engines, 'vLLM server')} x {each} {c.device}, behind one vllm-router"
    if trains and generates:
        where = "one after the other on the same devices" if c.colocate else "side by side"
        apart = (
            f"samples at most {plural(c.max_staleness, 'update')} old" if c.max_staleness else "synchronous"
        )
        yield f"order     {where}, {apart}"
    both = (c.world_size if trains else 0) + c.rollout_num_gpus
    needed = max(c.world_size, c.rollout_num_gpus) if c.colocate and trains else both
    yield f"needs     {plural(needed, 'GPU' if c.device == 'cuda' else 'CPU place')}; this machine has {machine()}"


def kernels(c: Config) -> Iterator[str]:
    """What each operator of rl_kernel will run, as far as this machine can tell. Refused where strict must fail."""
    import torch

    if c.device == "cuda" and not torch.cuda.is_available():
        yield f"{headline(c)}; this machine has no GPU: the trainers decide, and the run prints it"
        return
    yield headline(c)
    for decision in decide(c, c.device):
        yield str(decision)


def watched(c: Config) -> Iterator[str]:
    """What is looked at on the way, where that was asked for."""
    if c.rlk_consistency != "off":
        yield f"every rollout compared with the engine, --rlk-consistency {c.rlk_consistency}: {c.run_dir}/audit.jsonl"
    if c.profile_steps:
        yield f"traces of the training of rollouts {c.profile_steps}: {c.run_dir}/profile"


def machine() -> str:
    """Cores and GPUs of this machine."""
    import torch

    return f"{os.cpu_count()} CPU cores and {plural(torch.cuda.device_count(), 'GPU')}"


def batches(c: Config) -> Iterator[str]:
    """The batch equation and what follows from it."""
    samples = c.rollout_batch_size * c.n_samples_per_prompt
    yield (
        f"--rollout-batch-size {c.rollout_batch_size} x --n-samples-per-prompt {c.n_samples_per_prompt} = "
        f"{samples} samples = --global-batch-size {c.global_batch_size} x "
        f"{plural(c.num_steps_per_rollout, 'optimizer step')} a rollout"
    )
    if c.over_sampling_batch_size > c.rollout_batch_size:
        yield f"prompts submitted at a time: {c.over_sampling_batch_size}"
    each = c.global_batch_size / c.data_parallel_size
    how = (
        f"packed up to {c.max_tokens_per_gpu * c.context_parallel_size} tokens a micro-batch"
        if c.use_dynamic_batch_size
        else f"{plural(c.micro_batch_size, 'sample')} a micro-batch"
    )
    yield f"about {each:.4g} samples a data-parallel rank and step, {how}"
    if c.num_rollout is not None:
        yield f"{plural(c.num_rollout, 'rollout')} = {plural(c.total_steps, 'optimizer step')}"


def prompts(c: Config) -> Iterator[str]:
    """Reads the prompt files whole, so that a malformed line is found here."""
    from slime.data.prompts import Columns, load_prompts
    from slime.rollout.evaluation import resolve_eval_datasets

    if c.disable_rollout_global_dataset or c.prompt_data is None:
        return
    columns = Columns(c.input_key, c.label_key, c.metadata_key, c.tool_key)
    number = len(load_prompts(c.prompt_data, columns))
    yield f"{c.prompt_data}: {plural(number, 'prompt')} = {number / c.rollout_batch_size:.4g} rollouts an epoch"
    if c.num_rollout is None:
        rollouts = number * c.num_epoch // c.rollout_batch_size
        if rollouts == 0:
            raise ValueError(
                f"--num-epoch must give at least one rollout, got {c.num_epoch} x {number} prompts for "
                f"--rollout-batch-size {c.rollout_batch_size}"
            )
        yield f"--num-epoch {c.num_epoch} = {rollouts} rollouts"
    for data in resolve_eval_datasets(c):
        columns = Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key)
        number = len(load_prompts(data.path, columns, flag="--eval-prompt-data"))
        yield f"evaluation {data.name}: {plural(number, 'prompt')} x {data.n_samples_per_eval_prompt} responses"


def engine_flags(c: Config) -> Iterator[str]:
    """What each engine and router flag becomes on the server's own command line; a given one replaces ours."""
    given = pair_up(c.engine.vllm_argv)
    names = {option(tokens) for tokens in given}
    for tokens in given:
        yield f"{'--vllm-' + tokens[0][2:]:<40} vLLM {' '.join(tokens)}"
    spec = EngineSpec(**engine_settings(c), run_key="", log_path="")
    server = EngineServer(spec).command()[3:]  # after "python -m module"
    for tokens in pair_up(server[: len(server) - len(spec.vllm_argv)]):
        if option(tokens) not in {"host", "port", *names}:  # the address is known when the server starts
            yield f"{'(set for you)':<40} vLLM {' '.join(tokens)}"
    for tokens in pair_up(c.engine.router_argv):
        yield f"{'--router-' + tokens[0][2:]:<40} vllm-router {' '.join(tokens)}"


def option(tokens: Sequence[str]) -> str:
    """What a flag sets: ["--no-enable-x"] and ["--enable-x=1"] -> "enable-x"."""
    return tokens[0].partition("=")[0].removeprefix("--").removeprefix("no-")


def pair_up(argv: Sequence[str]) -> list[list[str]]:
    """["--a", "1", "--b"] -> [["--a", "1"], ["--b"]]."""
    out: list[list[str]] = []
    for token in argv:
        if token.startswith("--"):
            out.append([token])
        else:
            out[-1].append(token)
    return out


def check_model(c: Config) -> str | None:
    """Ask the training backend whether it knows the model; a remark where that backend is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's remarks on what is not installed
            from slime.megatron_backend.model_config import check_hf_config
    except ImportError as error:
        return f"the model family was not checked: {error}"
    check_hf_config(read_hf_config(c.hf_checkpoint))
    return None


def count(number: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:g}"


def plural(number: int, word: str) -> str:
    """2, "rank" -> "2 ranks"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def amount(size: float) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def memory_lines(items: list[Item], total: bool) -> Iterator[str]:
    """Aligned lines of an estimate, with their sum."""
    for item in items:
        yield f"{item.name:<20} {amount(item.bytes):>11}   {item.arithmetic}"
    if total:
        together = amount(sum(i.bytes for i in items))
        yield f"{'together':<20} {together:>11}   at least; a 4B on an H200 peaked 18% above its estimate"


def transport(c: Config) -> str:
    """How published weights travel, and where files of them lie."""
    where = c.weight_dir or "a directory of their own in shared memory"
    return {
        "ipc": "the memory of the GPUs that both are on (ipc)",
        "nccl": "broadcast (nccl)",
        "disk": f"files in {where} (disk)",
    }[c.update_weight_transport]


def describe(c: Config) -> str:
    """The whole plan as text."""
    remark = check_model(c)
    hf = read_hf_config(c.hf_checkpoint)
    shape = Shape.of(hf)
    parts: dict[str, list[str]] = {
        "Model": [
            f"{hf.get('model_type')}, {count(shape.params)} parameters, {c.params_dtype} on {c.device}"
        ],
        "Topology": list(topology(c)),
        "Operators": list(kernels(c)),
        "Batches": list(batches(c)),
        "Data": list(prompts(c)),
        "Memory of a trainer rank": list(memory_lines(trainer_memory(c, shape), total=True)),
        "Memory of an engine, per GPU": list(memory_lines(engine_memory(c, shape), total=False)),
        "Engine flags": list(engine_flags(c)),
        "Records": [
            *watched(c),
            f"run directory {c.run_dir}",
            f"weights to engines by {transport(c)}",
        ],
        "Notes": [*c.notes, *([remark] if remark else [])],
    }
    if c.num_engines == 0:
        del parts["Memory of an engine, per GPU"], parts["Engine flags"]
    if c.debug_rollout_only:
        del parts["Memory of a trainer rank"]
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in parts.items() if lines
    )


def main(argv: Sequence[str]) -> int:
    """Print the plan of these flags. ValueError when anything about them is wrong."""
    print(describe(parse_config(argv)))
    return 0
