"""Chooses the flags of a launcher that decide whether a run fits: `python -m vime.memory.choose --run FLAGS -- USER'S`.

Prints on standard output the flags to add, and on standard error one line for each with its reason. Flags of the user
are not changed. If no choice fits, the exit status is 2, and the missing memory is printed. The same machine and flags
give the same choice:

    0. no recomputation of the layers and no --offload-train against the layout, unless nothing fits without
    1. the smallest part of Adam on the host with which the run fits at all, because this part costs the most time
    2. the most tokens in a micro-batch, of 8192 or more if possible
    3. the largest workspace of the LM head
    4. the largest share for the engine, up to that of the layout
    5. main weights of 32 bits on the device, or remainders of 16 bits if these do not fit. Choices 1 to 4 assume
       remainders, because Adam on the host takes longer

--grad-reduce-in-bf16 is never chosen, because it changes the results of a run. If a choice fits only with this flag,
the error names this flag. With --plan, a line on standard error names it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.config.config_file import split_argv, with_config_files
from slime.config.fields import spelled
from slime.config.sections.cluster import PARTS
from slime.models.decoder import Hf
from slime.operators import loss_head
from slime.plan.advice import gradient_sums, offloading, recomputation, remainders
from slime.plan.fit import MachineSizes, shortage
from slime.plan.memory_estimate import longest_sample
from vime.backends import parse_config
from vime.memory.lines import remedies, whole_fit
from vime.memory.sizes import for_gpus, machine_sizes, take_sizes
from vime.vllm.backend import engine_facts
from vime.vllm.memory import engine_need

PLAN, RUN = "--plan", "--run"
"""First argument. With --plan, nothing is started and nothing is an error: without a choice that fits, the plan shows
why."""
_WITH_SUMS = (
    "with --grad-reduce-in-bf16, which sums the gradients of micro-batches in bfloat16, the launcher finds flags "
    "that fit"
)
_TOKENS = (32768, 24576, 20480, 16384, 12288, 8192, 6144, 4096, 2048, 1024)
_USUAL_TOKENS = 8192


def read_number(text: str) -> int:
    """Returns the value of an integer of vLLM's flags: 8192, 8k (8,000), 8K (8,192), 1.5g. Raises ValueError for other
    texts."""
    powers = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number, unit = (text[:-1], powers[text[-1]]) if text[-1:] in powers else (text, 1)
    return int(text) if unit == 1 else int(float(number) * unit)


_ENGINE_FLAGS: dict[str, Callable[[str], float | str]] = {
    "gpu_memory_utilization": float,
    "kv_cache_memory_bytes": read_number,
    "max_model_len": read_number,
    "max_num_seqs": read_number,
    "max_num_batched_tokens": read_number,
    "data_parallel_size": read_number,
    "pipeline_parallel_size": read_number,
    "dtype": str,
}
"""vLLM's flags for the memory of an engine, with the types of their values."""
CARD = 0.97
"""Part of a card that a choice fills. Measured peaks of the fullest phase were up to 2% above the plan."""
_OFFLOAD = {"offload", "offload_train", "no_offload_train", "offload_train_parts"}
_RECOMPUTATION = {
    f"recompute_{what}" for what in ("activations", "granularity", "method", "modules", "num_layers")
}
_SUMS = {
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
    "grad_reduce_in_fp32",
    "no_grad_reduce_in_fp32",
}
"""Flags for the dtype in which gradients are summed."""
_WORKSPACES_MIB = (1024, 512, 256)
_TENTHS = tuple(n / 10 for n in range(11))


@dataclass(frozen=True)
class Knob:
    """A flag that may be chosen, and its values from the best to the one that needs the least memory."""

    values: tuple[float, ...]
    set: Callable[[Config, float], Config]
    spell: Callable[[float], str]


@dataclass(frozen=True)
class Chosen:
    """One flag with its value, as typed, and the reason."""

    flag: str
    why: str


class NoChoiceError(ValueError):
    """No choice of flags makes a run fit."""

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy
        """The flag with which a choice fits, as a sentence, or an empty string if no such flag is known."""


def choose(c: Config, hf: Hf, machine: MachineSizes, user_flags: set[str]) -> list[Chosen]:
    """Returns the flags that make a run fit. The list is empty if the run fits unchanged.

    `user_flags` has the names of the flags that the user set. Raises NoChoiceError if no choice fits.
    """
    if machine.device is None or c.cluster.device != "cuda":
        return []
    machine = dataclasses.replace(machine, device=CARD * machine.device)
    before = whole_fit(c, hf, machine)
    if before.over <= 0:
        return []
    if (found := _search(c, hf, machine, user_flags)) is not None:
        return found
    assert before.worst is not None
    got = f"{shortage(before.worst)} without changes, and no choice of flags that were not given fits"
    if _sums_help(c, hf, machine, user_flags):
        raise NoChoiceError(
            f"the run must fit this machine, got {got}; {_WITH_SUMS}: add this flag or use larger GPUs and hosts",
            _WITH_SUMS,
        )
    flags = "; ".join(remedies(c, hf, machine)) or "no flag alone helps"
    raise NoChoiceError(
        f"the run must fit this machine, got {got}; give others or use larger GPUs and hosts: {flags}"
    )


def _search(c: Config, hf: Hf, machine: MachineSizes, user_flags: set[str]) -> list[Chosen] | None:
    """Returns the best choice, or None if no choice fits. `machine` has the part of a card that a choice may fill."""
    assert machine.device is not None
    last = list(last_resorts(c, user_flags))
    for resorts, floor in itertools.product(([], last) if last else ([],), (_USUAL_TOKENS, 0)):
        knobs = [
            *resorts,
            *list_knobs(c, user_flags, floor),
            *share_knobs(c, hf, machine.device, user_flags),
            *main_weight_knobs(c, user_flags),
        ]
        if (found := _choice(c, hf, machine, knobs)) is not None:
            return found
    return None


def _sums_help(c: Config, hf: Hf, machine: MachineSizes, user_flags: set[str]) -> bool:
    """Returns True if a choice fits with --grad-reduce-in-bf16, and the user has not decided in which dtype gradients
    are summed."""
    if _SUMS & user_flags:
        return False
    return any(_search(one.config, hf, machine, user_flags) is not None for one in gradient_sums(c)[:1])


def _choice(c: Config, hf: Hf, machine: MachineSizes, knobs: Sequence[Knob]) -> list[Chosen] | None:
    """Returns the best values, chosen knob after knob, while later knobs have the values that need least. Returns None
    if nothing fits. A reason names the shortage with the value before."""
    least = [knob.values[-1] for knob in knobs]
    picked: list[float] = []
    why: list[str] = []
    for i, knob in enumerate(knobs):
        last, before = knob.values[0], None
        for value in knob.values:
            found = whole_fit(_with(c, knobs, [*picked, value, *least[i + 1 :]]), hf, machine)
            if found.over <= 0:
                break
            last, before = value, found
        else:
            return None
        picked.append(value)
        worst = None if before is None else before.worst
        with_last = "without it" if knob.values == (0, 1) else f"with {last:g}"
        why.append("" if worst is None else f"{with_last} the run needs {shortage(worst)}")
    names = zip(knobs, picked, why, strict=True)
    return [Chosen(knob.spell(value), text) for knob, value, text in names if value != knob.values[0]]


def _with(c: Config, knobs: Sequence[Knob], values: Sequence[float]) -> Config:
    for knob, value in zip(knobs, values, strict=True):
        if value != knob.values[0]:
            c = knob.set(c, value)
    return c


def last_resorts(c: Config, user_flags: set[str]) -> Iterator[Knob]:
    """Yields the knobs that cost time in each step: offload of the trainer's state to the host, and recomputation of
    the layers."""
    if not _OFFLOAD & user_flags and offloading(c):
        parts = f" --offload-train-parts {' '.join(PARTS)}" if c.cluster.offload_train_parts else ""
        yield Knob((0, 1), lambda c, _: offloading(c)[0].config, lambda _: f"--offload-train{parts}")
    if not _RECOMPUTATION & user_flags and (full := recomputation(c)):
        yield Knob((0, 1), lambda c, _: recomputation(c)[0].config, lambda _: full[0].flag)


def list_knobs(c: Config, user_flags: set[str], least_tokens: int) -> Iterator[Knob]:
    """Yields the knobs that the user did not set. The first value of a knob is the layout's value."""
    adam = {"optimizer_cpu_offload", "no_optimizer_cpu_offload", "optimizer_offload_fraction"}
    if (
        not adam & user_flags
        and c.megatron.use_distributed_optimizer
        and not c.megatron.optimizer_cpu_offload
    ):
        yield Knob(
            _TENTHS,
            lambda c, part: c.with_values(optimizer_cpu_offload=True, optimizer_offload_fraction=part),
            lambda part: f"--optimizer-cpu-offload --optimizer-offload-fraction {part:g}",
        )
    now = c.data.max_tokens_per_gpu
    if "max_tokens_per_gpu" not in user_flags and c.data.use_dynamic_batch_size and now is not None:
        least = max(longest_sample(c), least_tokens)
        yield Knob(
            (now, *(n for n in _TOKENS if least <= n < now)),
            lambda c, tokens: c.with_values(max_tokens_per_gpu=int(tokens)),
            lambda tokens: f"--max-tokens-per-gpu {tokens:g}",
        )
    mib = c.kernels.rl_kernel_workspace_mib
    if "rl_kernel_workspace_mib" not in user_flags and not loss_head(c)[0].has_logits:
        yield Knob(
            (mib, *(n for n in _WORKSPACES_MIB if n < mib)),
            lambda c, size: c.with_values(rl_kernel_workspace_mib=int(size)),
            lambda size: f"--rl-kernel-workspace-mib {size:g}",
        )


def share_knobs(c: Config, hf: Hf, device: float, user_flags: set[str]) -> Iterator[Knob]:
    """Yields the engine's share of a card. Its weights and one sequence must fit in the share."""
    facts = c.engine.engine_facts
    flag, share = facts.flag("memory_share"), facts.memory_share
    if flag.removeprefix("--").replace("-", "_") in user_flags or facts.cache_bytes or not c.num_engines:
        return

    def with_share(c: Config, part: float) -> Config:
        return c.with_values(engine_facts=dataclasses.replace(c.engine.engine_facts, memory_share=part))

    less = (n / 20 for n in range(19, 1, -1) if n / 20 < share)
    yield Knob(
        (share, *(part for part in less if engine_need(with_share(c, part), hf, device).over <= 0)),
        with_share,
        lambda part: f"{flag} {part:g}",
    )


def main_weight_knobs(c: Config, user_flags: set[str]) -> Iterator[Knob]:
    """Yields main weights as remainders of 16 bits. They can be combined with a part of Adam on the host."""
    own = {"use_precision_aware_optimizer", "no_use_precision_aware_optimizer"}
    if not own & user_flags and (found := remainders(c)):
        yield Knob(
            (0, 1), lambda c, _: c.with_values(use_precision_aware_optimizer=True), lambda _: found[0].flag
        )


_ENGINES_PER_GPU = "rollout_engines_per_gpu"
"""A flag whose rule reads the bytes of the engines' KV cache."""


def light_config(argv: Sequence[str]) -> Config:
    """Returns the configuration without the engine's parser, whose import takes seconds.

    It reads only those engine flags that affect the engine's memory. `vime train` parses all flags, and checks the
    rules that read engine flags.
    """
    own, engine, later = list[str](), dict[str, float | str](), dict[str, int]()
    for group in with_config_files(split_argv(argv)):
        prefix, _, name = group.name.partition("_")
        if prefix == "vllm" and name in _ENGINE_FLAGS and group.values:
            with suppress(ValueError):  # the engine's parser refuses the value later, with its own message
                engine[name] = _ENGINE_FLAGS[name](group.values[-1])
        if group.name == _ENGINES_PER_GPU and re.fullmatch("[1-9][0-9]*", "".join(group.values[-1:])):
            later[group.name] = int(group.values[-1])
        elif prefix not in ("vllm", "router"):
            own += [spelled(group.name), *group.values]
    c = parse_config(own)
    facts = engine_facts(engine) if c.engine.rollout_backend == "vllm" else c.engine.engine_facts
    return c.with_values(engine_facts=facts, backend_args={**c.engine.backend_args, **engine}, **later)


def main(argv: Sequence[str]) -> int:
    plans, rest = argv[0] == PLAN, list(argv[1:])
    at = rest.index("--")
    layout, user = rest[:at], rest[at + 1 :]
    try:
        flags, sizes = take_sizes([*layout, *user])
        c = light_config(for_gpus(flags, sizes.gpu))
        user_flags = {group.name for group in with_config_files(split_argv(take_sizes(user)[0]))}
        machine = machine_sizes(c, sizes)
        if not plans and sizes.gpu is None:
            # A layout names the GPU for which it was made with --gpu. The run starts on the GPUs of this machine.
            here = machine_sizes(c, sizes, here_only=True)
            machine = machine if here.device is None else here
        found = choose(c, read_hf_config(c.rollout.hf_checkpoint), machine, user_flags)
    except ValueError as error:
        if plans:
            if isinstance(error, NoChoiceError) and error.remedy:
                print(f"memory: no choice of flags fits; {error.remedy}: add this flag", file=sys.stderr)
            return 0
        print(f"vime train: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(f"memory: {one.flag}: {one.why}", file=sys.stderr)
    print(*(one.flag for one in found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
