"""`vime plan`: checks a set of flags and prints the resolved run. Starts nothing and allocates nothing.

Memory is estimated from shapes (slime/plan/memory_estimate.py). A run decides from the same estimates
(slime/plan/memory_decision.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.config.config_file import split_argv, with_config_files
from slime.hardware import HARDWARE
from slime.operators import decide, headline
from slime.plan.loading_estimate import loading
from slime.plan.memory_decision import TOO_SMALL, decide_residence
from slime.plan.memory_estimate import Item, adapters_sent, estimate
from slime.plan.model_shape import Shape
from slime.plan.stages import micro_batch_group, stages_of
from slime.plan.units import GIB, amount, count
from slime.roles import order_of_step
from slime.roles.groups import Group, groups_of, sent_lines, trainer_ranks
from slime.roles.served import ServedModel, frozen_devices
from slime.rollout.eval_datasets import check_evaluation
from slime.run_start import check_start, start_line
from slime.weight_sync.registry import CHANNELS
from vime.backends import backend_of, models_of, parse_config
from vime.plan_hardware import hardware, machine, update
from vime.pool.served import in_own_flags
from vime.run.prompts import plural, prompts
from vime.vllm.memory import engine_memory, engine_verdict, scored_logits

GPU_MEMORY = "--gpu-memory-gib"
"""The only option of `vime plan` that is not a flag of a run."""


def routed(shape: Shape) -> str:
    """The text about experts after the number of parameters."""
    if not any(kind.sparse for kind in shape.kinds):
        return ""
    return f", of the layers' {count(shape.active)} for a token ({shape.topk} of {shape.experts} experts)"


def topology(c: Config) -> Iterator[str]:
    """The processes of the run and their devices."""
    trains, generates = not c.debug.debug_rollout_only, c.num_engines > 0
    if trains:
        groups = groups_of(c)
        for group in groups:
            yield _trainer_line(group)
            yield from pipeline(c)
            yield f"step      {order_of_step(group.config)}"
        yield from (f"sent      {line}" for line in sent_lines(groups))
    for model, _, own in models_of(c):
        yield _engines_line(own, model)
    if trains and generates:
        where = "one after the other on the same devices" if c.cluster.colocate else "side by side"
        apart = (
            f"samples at most {plural(c.rollout.max_staleness, 'update')} old"
            if c.rollout.max_staleness
            else "synchronous"
        )
        yield f"order     {where}, {apart}"
    places = plural(_places(c, trains), "GPU" if c.cluster.device == "cuda" else "CPU place")
    yield f"needs     {places}; this machine has {machine()}"


def _trainer_line(group: Group) -> str:
    """The ranks of a group of the trainer's, and what they split."""
    c = group.config
    sizes = {
        "tensor parallel": c.megatron.tensor_model_parallel_size,
        "context parallel": c.megatron.context_parallel_size,
        "data parallel": c.data_parallel_size,
        "pipeline parallel": c.megatron.pipeline_model_parallel_size,
    }
    shared = c.megatron.expert_model_parallel_size
    usual = ("tensor parallel", "data parallel")
    ways = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1 or name in usual)
    split = c.megatron.expert_tensor_parallel
    apart = f", each split over {split}" if shared > 1 and split > 1 else ""
    return (
        f"{group.name:<9} {plural(c.cluster.actor_num_nodes, 'node')} x {c.cluster.actor_num_gpus_per_node} = "
        f"{plural(c.world_size, 'rank')}: {ways}{f', experts over {shared}{apart}' if shared > 1 else ''}"
    )


def _engines_line(c: Config, model: ServedModel) -> str:
    """The servers of a model's engines, and their router."""
    each = c.cluster.rollout_num_gpus_per_engine
    facts, name = c.engine.engine_facts, model.name if model.frozen else "engines"
    spread = f", each {c.nodes_per_engine} processes on {c.nodes_per_engine} nodes of {c.cluster.num_gpus_per_node}"
    return (
        f"{name:<9} {plural(c.num_engines, f'{facts.project} server')} x {each} {c.cluster.device}"
        f"{spread if c.nodes_per_engine > 1 else ''}{'' if model.frozen else _split(c)}, behind one {facts.router}"
        f"{', started apart' if c.rollout.rollout_external_engine_addrs else ''}"
        f"{f', with the weights of {model.checkpoint}' if model.frozen else ''}"
    )


def _split(c: Config) -> str:
    """The number of engines of each kind, where there are two."""
    prefill = c.engine.prefill_num_servers
    return f", {prefill} for prefill and {c.num_engines - prefill} for decode" if prefill else ""


def _places(c: Config, trains: bool) -> int:
    """GPUs, or places on a CPU, that the run takes."""
    rollout_gpus, frozen = c.cluster.rollout_num_gpus, frozen_devices(c)
    if c.cluster.colocate and trains:
        return max(c.world_size, rollout_gpus) + trainer_ranks(c) - c.world_size + frozen
    external = c.rollout.rollout_external_engine_addrs
    return trainer_ranks(c) + (0 if external else rollout_gpus) + frozen


def pipeline(c: Config) -> Iterator[str]:
    """The layers of each pipeline rank, for more than one rank."""
    layers = Shape.of(hf_config_of(c)).layers
    stages = stages_of(c.megatron, layers)
    if stages.ranks == 1:
        return
    of_ranks = [f"{len(stages.layers(rank))}" for rank in range(stages.ranks)]
    virtual = ""
    if stages.virtual > 1:
        group = micro_batch_group(c.megatron, layers)
        virtual = f" in {stages.virtual} virtual stages, micro-batches in groups of {group}"
    yield f"layers    {' + '.join(of_ranks)} on the pipeline's ranks{virtual}"


def kernels(c: Config) -> Iterator[str]:
    """The implementation of each operator of rl_kernel, as far as this machine can decide. ValueError if strict
    fails."""
    import torch

    if c.cluster.device == "cuda" and not torch.cuda.is_available():
        yield f"{headline(c)}; this machine has no GPU: the trainers decide, and the run prints it"
        return
    yield headline(c)
    for decision in decide(c, c.cluster.device):
        yield str(decision)


def watched(c: Config) -> Iterator[str]:
    """The checks and traces that the flags enable."""
    run_dir = c.logging.run_dir
    if (how := c.kernels.rlk_consistency) != "off":
        yield f"every rollout compared with the engine, --rlk-consistency {how}: {run_dir}/audit.jsonl"
    if c.debug.record_memory_history:
        yield f"memory snapshots of trainer ranks: {c.debug.memory_snapshot_dir or f'{run_dir}/profile'}"
    if c.debug.profile_steps:
        yield f"traces of the training of rollouts {c.debug.profile_steps}: {run_dir}/profile"


def batches(c: Config) -> Iterator[str]:
    """The batch equation and the numbers that follow from it."""
    batch, size, steps = c.data.rollout_batch_size, c.data.global_batch_size, c.data.num_steps_per_rollout
    submitted = c.rollout.over_sampling_batch_size
    samples = batch * c.data.n_samples_per_prompt
    yield (
        f"--rollout-batch-size {batch} x --n-samples-per-prompt {c.data.n_samples_per_prompt} = "
        f"{samples} samples = --global-batch-size {size} x "
        f"{plural(steps, 'optimizer step')} a rollout"
    )
    if submitted > batch:
        yield f"prompts submitted at a time: {submitted}"
    each = size / c.data_parallel_size
    how = f"{plural(c.data.micro_batch_size, 'sample')} a micro-batch"
    if c.data.use_dynamic_batch_size:
        most = c.data.max_tokens_per_gpu
        assert most is not None
        how = f"packed up to {most * c.megatron.context_parallel_size} tokens a micro-batch"
    yield f"about {each:.4g} samples a data-parallel rank and step, {how}"
    if c.data.num_rollout is not None:
        yield f"{plural(c.data.num_rollout, 'rollout')} = {plural(c.total_steps, 'optimizer step')}"


def hf_config_of(c: Config) -> dict[str, object]:
    """The description of the model of --hf-checkpoint."""
    return read_hf_config(c.rollout.hf_checkpoint)


def check_model(c: Config) -> str | None:
    """Check that the training backend supports the model. Returns a note if the backend is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's warnings about packages that are not installed
            from slime.megatron_backend.model.model_config import check_hf_config
    except ImportError as error:
        return f"the model family was not checked: {error}"
    check_hf_config(hf_config_of(c))
    return None


def notes(c: Config) -> list[str]:
    """The values that were adjusted, and why. ValueError for a model that the training backend does not support."""
    remark = check_model(c)
    return [*c.notes, *([remark] if remark else [])]


def memory_lines(items: Sequence[Item]) -> Iterator[str]:
    """Aligned lines of an estimate."""
    for item in items:
        yield f"{item.name:<20} {amount(item.bytes):>11}   {item.arithmetic}"


def trainer_memory(c: Config, hf: dict[str, object], gpu_bytes: float | None) -> Iterator[str]:
    """The memory that a rank keeps, the memory that a step adds, and their sum at the peak; the parts that are
    offloaded for the engines; and whether the GPU is large enough, if its size is known."""
    e = estimate(c, hf)
    yield from memory_lines(e.kept)
    yield "and one at a time, in a step:"
    yield from memory_lines(e.work)
    yield f"{'peak':<20} {amount(e.peak):>11}   reported against as perf/memory/estimate_gib"
    if e.host:
        yield "on the host:"
        yield from memory_lines(e.host)
    yield from decide_residence(c, e, gpu_bytes).lines


def memory_of_engine(
    c: Config, hf: dict[str, object], gpu_bytes: float | None, *, scores: bool = False
) -> Iterator[str]:
    """Weights and KV cache, and whether the GPU is large enough, if its size is known. `scores`: also the logits of
    given tokens."""
    yield from memory_lines(engine_memory(c, Shape.of(hf)))
    if scores and c.cluster.device == "cuda" and c.engine.rollout_backend == "vllm":
        yield from memory_lines([scored_logits(c, Shape.of(hf))])
    if gpu_bytes is not None:
        yield engine_verdict(c, hf, gpu_bytes)


def frozen_models(c: Config, gpu_bytes: float | None) -> dict[str, list[str]]:
    """Title -> lines: the memory of each frozen model's engines, and the flags that are given for them."""
    parts: dict[str, list[str]] = {}
    for model, _, own in models_of(c):
        if model.frozen:
            try:
                lines = list(memory_of_engine(own, hf_config_of(own), gpu_bytes, scores=True))
            except ValueError as error:  # a family that the engine knows, and the trainer does not
                lines = [f"not estimated: {error}"]
            title = f"Memory of an engine of {model.name}, per GPU"
            parts[title] = [in_own_flags(line, model) for line in lines]
    return parts


def memory_in_short(c: Config, gpu_bytes: float | None = None) -> Iterator[str]:
    """The estimates in one line, then the decisions from them, for GPUs of `gpu_bytes` each or for this machine's
    GPU."""
    hf, gpu_bytes = hf_config_of(c), gpu_bytes or device_memory(c)
    estimates, decisions = [], list[str]()
    for group in () if c.debug.debug_rollout_only else groups_of(c):
        e = estimate(group.config, hf)
        estimates.append(f"a {group.name} rank {amount(e.peak)} at its peak")
        decisions += decide_residence(group.config, e, gpu_bytes).lines
    if c.num_engines:
        items = engine_memory(c, Shape.of(hf))
        estimates.append(
            f"an engine, per GPU, {', '.join(f'{item.name} {amount(item.bytes)}' for item in items)}"
        )
        if gpu_bytes is not None:
            decisions.append(f"an engine {engine_verdict(c, hf, gpu_bytes)}")
    yield "; ".join(estimates)
    yield from decisions


def device_memory(c: Config) -> int | None:
    """Bytes of this machine's GPU, or None without a GPU."""
    import torch

    if c.cluster.device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def transport(c: Config) -> str:
    """How published weights travel, and the directory of their files."""
    where = c.weight_update.weight_dir or "a new directory in shared memory"
    name = c.weight_update.update_weight_transport
    return f"{CHANNELS[name].plan.format(weight_dir=where)} ({name})"


def describe(c: Config, gpu_bytes: float | None = None, data: Sequence[str] | None = None) -> str:
    """The whole plan as text, for GPUs of `gpu_bytes` each or for this machine's GPU. `data`: lines of `prompts`."""
    gpu_bytes = gpu_bytes or device_memory(c)
    remarks = notes(c)
    hf = hf_config_of(c)
    shape = Shape.of(hf)
    groups = () if c.debug.debug_rollout_only else groups_of(c)
    parts: dict[str, list[str]] = {
        "Model": [
            f"{hf.get('model_type')}, {count(shape.params)} parameters{routed(shape)}, "
            f"{c.megatron.params_dtype} on {c.cluster.device}"
        ],
        "Start": [start_line(c)],
        "Topology": list(topology(c)),
        "Hardware": list(hardware(c, hf)),
        "Operators": list(kernels(c)),
        "Batches": list(batches(c)),
        "Data": list(prompts(c) if data is None else data),
        **{
            f"Memory of a {group.name} rank": list(trainer_memory(group.config, hf, gpu_bytes))
            for group in groups
        },
        **{
            f"Loading, per {group.name} rank": list(memory_lines(list(loading(group.config, hf))))
            for group in groups
        },
        "Update of the engines, per trainer rank": list(update(groups, shape)),
        "Memory of an engine, per GPU": list(memory_of_engine(c, hf, gpu_bytes)),
        "Engine flags": list(backend_of(c).command_lines(c)),
        **frozen_models(c, gpu_bytes),
        "Records": [
            *watched(c),
            f"run directory {c.logging.run_dir}",
            f"weights to engines by {transport(c)}{adapters_sent(c, Shape.of(hf_config_of(c)))}",
        ],
        "Notes": remarks,
    }
    if c.num_engines == 0:
        del parts["Memory of an engine, per GPU"], parts["Engine flags"]
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in parts.items() if lines
    )


def take_gpu_memory(argv: Sequence[str]) -> tuple[list[str], float | None]:
    """Split GPU_MEMORY off the flags of a run: (the flags, the number of GiB or None). The last use counts. ValueError
    unless the value is a number above 0."""
    flags, given = list[str](), None
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name.replace("_", "-") == GPU_MEMORY:
            given = value if equals else next(tokens, "")
        else:
            flags.append(token)
    if given is None:
        return flags, None
    return flags, gpu_gib(given)


def gpu_gib(given: str) -> float:
    """The value of GPU_MEMORY in GiB. ValueError unless it is a number above 0."""
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ValueError(
            f"{GPU_MEMORY} must be a number above 0, got {given or 'none'}; the memory of one GPU"
        )
    return size


def for_gpus(flags: Sequence[str], size: float | None) -> list[str]:
    """`flags`, with --device cuda added if `size` is given and they have no device."""
    named = any(group.name == "device" for group in with_config_files(split_argv(flags)))
    return [*flags, *(() if size is None or named else ("--device", "cuda"))]


def asked_bytes(c: Config, size: float | None) -> float | None:
    """Bytes of GPUs of `size` GiB, or of the GPU of --gpu, or None without both. ValueError for a run without GPUs."""
    if size is None:
        return None if c.cluster.gpu is None else HARDWARE[c.cluster.gpu].memory_gib * GIB
    if c.cluster.device != "cuda":
        raise ValueError(
            f"{GPU_MEMORY} must go with --device cuda, got --device {c.cluster.device}; leave out one of the two"
        )
    return size * GIB


def main(argv: Sequence[str]) -> int:
    """Print the plan of these flags. Returns 1 if the run does not fit the GPUs. ValueError for a wrong flag."""
    flags, size = take_gpu_memory(argv)
    data = list[str]()

    def model(config: Config) -> None:
        check_model(config)

    def readable(config: Config) -> None:
        data.extend(prompts(config))

    # Model and prompts are checked with the flags, so that one report has every reason.
    c = parse_config(for_gpus(flags, size), (model, check_evaluation, readable, check_start))
    asked = asked_bytes(c, size)
    told = describe(c, asked, data)
    print(told)
    verdicts = [line.strip() for line in told.splitlines()]
    return int(asked is not None and any(line.startswith(TOO_SMALL) for line in verdicts))
