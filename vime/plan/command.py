"""`vime plan`: checks a set of flags and prints the resolved run. Starts nothing and allocates nothing.

Memory is estimated from shapes (slime/plan/memory_estimate.py). A run decides from the same estimates
(slime/plan/memory_decision.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models import family_for
from slime.models.decoder import Hf
from slime.operators import decide, headline
from slime.plan.fit import MachineSizes
from slime.plan.loading_estimate import loading
from slime.plan.memory_decision import TOO_SMALL
from slime.plan.memory_estimate import adapters_sent
from slime.plan.model_shape import Shape
from slime.plan.scheme_bytes import count_quantized
from slime.plan.stages import build_stages, micro_batch_group
from slime.plan.units import count
from slime.roles import describe_step
from slime.roles.groups import RoleGroup, build_groups, sent_lines, trainer_ranks
from slime.roles.served import ServedModel, frozen_devices
from slime.weight_sync.registry import CHANNELS
from vime.backends import backend_for, served_engines
from vime.memory.compare import COMPARE, compare_run
from vime.memory.lines import (
    describe_engine_memory,
    frozen_models,
    host_lines,
    memory_lines,
    phase_lines,
    remedies,
    trainer_memory,
    whole_fit,
)
from vime.memory.sizes import for_gpus, machine_sizes, requested_bytes, take_sizes
from vime.plan.hardware import hardware, update
from vime.plan.hardware import machine as this_machine
from vime.plan.search.command import SEARCH
from vime.plan.search.command import main as search_layouts
from vime.run.prompts import plural, prompts
from vime.start.checks import Inputs, check_run, find_missing_weights, plans_other_machine, read_inputs
from vime.start.first_prompt import FirstPrompt
from vime.start.run_start import start_line
from vime.vllm.quantized.machines import planned_support


def routed(shape: Shape) -> str:
    """Returns the text about experts after the number of parameters."""
    if not any(kind.sparse for kind in shape.kinds):
        return ""
    return f", of the layers' {count(shape.active)} for a token ({shape.topk} of {shape.experts} experts)"


def scheme_lines(c: Config, hf: Hf) -> Iterator[str]:
    """Yields the scheme of a quantised checkpoint, the share of the parameters that it quantises, and whether engines
    of vLLM run it on the devices of the run."""
    scheme, shape = family_for(hf).scheme(hf), Shape.of(hf)
    found = count_quantized(shape)
    if scheme is not None and found is not None:
        share = (found.others + found.experts) / shape.params
        yield f"checkpoint and engines: {scheme.title} ({share:.0%} of the parameters, {found.bytes:.4g} B each)"
        if c.num_engines and backend_for(c).name == "vllm":
            support = planned_support(c, hf, scheme)
            yield support.text if support.runs else f"{support.text}, so engines would not start here"


def topology(c: Config) -> Iterator[str]:
    """Yields the processes of the run and their devices."""
    trains, generates = not c.debug.debug_rollout_only, c.num_engines > 0
    if trains:
        groups = build_groups(c)
        for group in groups:
            yield _trainer_line(group)
            yield from pipeline(c)
            yield f"step      {describe_step(group.config)}"
        yield from (f"sent      {line}" for line in sent_lines(groups))
    for engines in served_engines(c):
        yield _engines_line(engines.settings, engines.model)
    if trains and generates:
        where = "one after the other on the same devices" if c.cluster.colocate else "side by side"
        phases = (
            f"samples at most {plural(c.rollout.max_staleness, 'update')} old"
            if c.rollout.max_staleness
            else "synchronous"
        )
        yield f"order     {where}, {phases}"
    devices = plural(_device_count(c, trains), "GPU" if c.cluster.device == "cuda" else "CPU slot")
    yield f"needs     {devices}; this machine has {this_machine()}"


def _trainer_line(group: RoleGroup) -> str:
    """Describes the ranks of a group of the trainer, and their parallel sizes."""
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
    expert_split = f", each split over {split}" if shared > 1 and split > 1 else ""
    return (
        f"{group.name:<9} {plural(c.cluster.actor_num_nodes, 'node')} x {c.cluster.actor_num_gpus_per_node} = "
        f"{plural(c.world_size, 'rank')}: {ways}{f', experts over {shared}{expert_split}' if shared > 1 else ''}"
    )


def _engines_line(c: Config, model: ServedModel) -> str:
    """Describes the servers of a model's engines, and their router."""
    each = c.cluster.rollout_num_gpus_per_engine
    facts, name = c.engine.engine_facts, model.name if model.frozen else "engines"
    spread = f", each {c.nodes_per_engine} processes on {c.nodes_per_engine} nodes of {c.cluster.num_gpus_per_node}"
    return (
        f"{name:<9} {plural(c.num_engines, f'{facts.project} server')} x {each} {c.cluster.device}"
        f"{spread if c.nodes_per_engine > 1 else ''}{'' if model.frozen else _split(c)}, behind one {facts.router}"
        f"{', external' if c.rollout.rollout_external_engine_addrs else ''}"
        f"{f', with the weights of {model.checkpoint}' if model.frozen else ''}"
    )


def _split(c: Config) -> str:
    """Returns the number of prefill and decode engines, if the policy's engines are split."""
    prefill = c.engine.prefill_num_servers
    return f", {prefill} for prefill and {c.num_engines - prefill} for decode" if prefill else ""


def _device_count(c: Config, trains: bool) -> int:
    """Returns the number of GPUs, or of slots on a CPU, that the run takes."""
    rollout_gpus, frozen = c.cluster.rollout_num_gpus, frozen_devices(c)
    if c.cluster.colocate and trains:
        return max(c.world_size, rollout_gpus) + trainer_ranks(c) - c.world_size + frozen
    external = c.rollout.rollout_external_engine_addrs
    return trainer_ranks(c) + (0 if external else rollout_gpus) + frozen


def pipeline(c: Config) -> Iterator[str]:
    """Yields each pipeline rank's layers, for more than one rank."""
    layers = Shape.of(checkpoint_config(c)).layers
    stages = build_stages(c.megatron, layers)
    if stages.ranks == 1:
        return
    rank_layers = [f"{len(stages.layers(rank))}" for rank in range(stages.ranks)]
    virtual = ""
    if stages.virtual > 1:
        group = micro_batch_group(c.megatron, layers)
        virtual = f" in {stages.virtual} virtual stages, micro-batches in groups of {group}"
    yield f"layers    {' + '.join(rank_layers)} on the pipeline's ranks{virtual}"


def kernels(c: Config) -> Iterator[str]:
    """Yields each rl_kernel operator's implementation, as far as this machine can decide. Raises ValueError if strict
    fails."""
    import torch

    if c.cluster.device == "cuda" and not torch.cuda.is_available():
        yield f"{headline(c)}; this machine has no GPU: the trainers decide, and the run prints it"
        return
    yield headline(c)
    for decision in decide(c, c.cluster.device):
        yield str(decision) if c.logging.verbose else decision.short


def watched(c: Config) -> Iterator[str]:
    """Yields the checks and traces that the flags enable."""
    run_dir = c.logging.run_dir
    if (how := c.kernels.rlk_consistency) != "off":
        yield f"every rollout compared with the engine, --rlk-consistency {how}: {run_dir}/audit.jsonl"
    if c.debug.record_memory_history:
        yield f"memory snapshots of trainer ranks: {c.debug.memory_snapshot_dir or f'{run_dir}/profile'}"
    if c.debug.profile_steps:
        yield f"traces of the training of rollouts {c.debug.profile_steps}: {run_dir}/profile"


def _steps(c: Config) -> str:
    """Returns the optimizer steps of a rollout in words."""
    sizes = c.data.step_sizes
    steps = plural(len(sizes), "optimizer step")
    if len(set(sizes)) > 1:
        return f"{' + '.join(map(str, sizes))} in {steps}"
    return f"--global-batch-size {sizes[0]} x {steps}"


def batches(c: Config) -> Iterator[str]:
    """Yields the batch equation and the numbers that follow from it."""
    batch, size = c.data.rollout_batch_size, c.data.global_batch_size
    submitted = c.rollout.over_sampling_batch_size
    samples = batch * c.data.n_samples_per_prompt
    yield (
        f"--rollout-batch-size {batch} x --n-samples-per-prompt {c.data.n_samples_per_prompt} = "
        f"{samples} samples = {_steps(c)} a rollout"
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


def checkpoint_config(c: Config) -> dict[str, object]:
    """Returns the content of config.json of --hf-checkpoint."""
    return read_hf_config(c.rollout.hf_checkpoint)


def transport(c: Config) -> str:
    """Describes how published weights reach the engines, and the directory of their files."""
    where = c.weight_update.weight_dir or "a new directory in shared memory"
    name = c.weight_update.update_weight_transport
    return f"{CHANNELS[name].plan.format(weight_dir=where)} ({name})"


def describe(c: Config, machine: MachineSizes | None = None, data: Sequence[str] | None = None) -> str:
    """Returns the whole plan as text, for `machine` or for this machine. `data` has the lines of `prompts`."""
    machine = machine or machine_sizes(c)
    gpu_bytes = machine.device
    hf = checkpoint_config(c)
    found = whole_fit(c, hf, machine)
    shape = Shape.of(hf)
    groups = () if c.debug.debug_rollout_only else build_groups(c)
    parts: dict[str, list[str]] = {
        "Model": [
            f"{hf.get('model_type')}, {count(shape.params)} parameters{routed(shape)}, "
            f"{c.megatron.params_dtype} on {c.cluster.device}",
            *scheme_lines(c, hf),
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
        "Memory of an engine, per GPU": list(describe_engine_memory(c, hf, gpu_bytes)),
        "Memory of a host": list(host_lines(found, machine)),
        "Memory by phase": list(phase_lines(found)),
        "What would make it fit": remedies(c, hf, machine),
        "Engine flags": list(backend_for(c).command_lines(c)),
        **frozen_models(c, gpu_bytes),
        "Records": [
            *watched(c),
            f"run directory {c.logging.run_dir}",
            f"weights to engines by {transport(c)}{adapters_sent(c, Shape.of(checkpoint_config(c)))}",
        ],
        "Notes": list(c.notes),
    }
    if c.num_engines == 0:
        del parts["Memory of an engine, per GPU"], parts["Engine flags"]
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in parts.items() if lines
    )


def main(argv: Sequence[str]) -> int:
    """Prints the plan of these flags, or with COMPARE next to a run's measurements.

    Returns 1 if the run does not fit the requested machine. Raises ValueError for a run that `vime train` would not
    start.
    """
    if argv and argv[0] == COMPARE:
        return compare_run(argv[1:])
    if any(word.partition("=")[0] == SEARCH for word in argv):
        return search_layouts(argv)
    flags, sizes = take_sizes(argv)
    data, first = list[str](), FirstPrompt()

    names_device = any(word.partition("=")[0] == "--device" for word in flags)

    def is_planned_without_weights(config: Config) -> bool:
        return (
            not names_device
            and config.rollout.hf_checkpoint is not None
            and find_missing_weights(config) is not None
        )

    def is_elsewhere(config: Config) -> bool:
        return plans_other_machine(config, sizes) or is_planned_without_weights(config)

    def read_part(config: Config) -> int | None:
        data.extend([*prompts(config, first.score), *first.lines()])
        return config.data.num_rollout

    def read(config: Config) -> Inputs:
        return read_inputs(config, read_part, tokenizer=not is_elsewhere(config))

    c = check_run(for_gpus(flags, sizes.gpu), read, is_elsewhere=is_elsewhere)
    machine = machine_sizes(c, sizes)
    report = describe(c, machine, data)
    if is_planned_without_weights(c):
        report += f"\nNot checked\n  this machine: {find_missing_weights(c)} has no weights, which `vime train` needs"
    print(report)
    asked = requested_bytes(c, sizes.gpu) is not None or sizes.host is not None
    verdicts = [line.strip() for line in report.splitlines()]
    return int(asked and any(line.startswith(TOO_SMALL) for line in verdicts))
