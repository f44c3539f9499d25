"""Assigns layers to the stages of the pipeline: --pipeline-model-parallel-size and the flags that refine it.

Trainer, memory estimate, plan and flag checks all read `Stages`, and Megatron gets the same list. The module imports
neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.sections.megatron import MegatronConfig
from slime.records.errors import FlagError

_LAYOUT, _PER_STAGE = "--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Stages:
    """The layers of every pipeline stage. `counts[v][r]` is the number of layers of virtual stage v on pipeline rank r.

    The layers run through all ranks of virtual stage 0, then through all ranks of virtual stage 1, and so on. The first
    stage also has the embedding, the last stage the head.
    """

    counts: tuple[tuple[int, ...], ...]

    @property
    def virtual(self) -> int:
        """Returns the number of virtual stages per rank. 1 means that the pipeline is not interleaved."""
        return len(self.counts)

    @property
    def ranks(self) -> int:
        return len(self.counts[0])

    def get_rank_layers(self, rank: int) -> list[range]:
        """Returns the numbers of the layers of a rank, for each of its virtual stages."""
        flat = [count for of_virtual in self.counts for count in of_virtual]
        ends = list(itertools.accumulate(flat))
        positions = [virtual * self.ranks + rank for virtual in range(self.virtual)]
        return [range(ends[position] - flat[position], ends[position]) for position in positions]

    def layers(self, rank: int) -> list[int]:
        """Returns the numbers of a rank's layers."""
        return [layer for of_stage in self.get_rank_layers(rank) for layer in of_stage]

    def layout(self, predictions: int = 0) -> list[list[str]]:
        """Returns the stages as Megatron's `pipeline_model_parallel_layout` spells them. `predictions` is the number of
        layers of multi-token prediction, which the last stage has."""
        stages = [["decoder"] * count for of_virtual in self.counts for count in of_virtual]
        stages[0].insert(0, "embedding")
        stages[-1] += ["mtp"] * predictions + ["loss"]
        return stages

    def passes(self, rank: int, group: int) -> int:
        """Returns the most passes of a micro-batch through one virtual stage that wait for their backward on a rank.

        1F1B keeps one pass for each rank from this one to the last. The interleaved schedule computes `group`
        micro-batches in one virtual stage before it continues with the next stage (2104.04473, part 2.2).
        """
        to_last = self.ranks - rank
        return to_last if self.virtual == 1 else (self.virtual - 1) * group + 2 * to_last - 1

    def micro_batches(self, rank: int, group: int) -> int:
        """Returns the most micro-batches with such a pass."""
        cycles, rest = divmod(self.passes(rank, group), self.virtual * group)
        return cycles * group + min(rest, group)


def _counted(m: MegatronConfig) -> dict[str, bool]:
    """Returns, per flag, whether the embedding or the loss counts as a layer."""
    return {
        "--account-for-embedding-in-pipeline-split": m.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": m.account_for_loss_in_pipeline_split,
    }


def _ends(m: MegatronConfig) -> dict[str, int | None]:
    """Returns the numbers of layers of the first and the last rank, if they were given."""
    return {
        "--decoder-first-pipeline-num-layers": m.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": m.decoder_last_pipeline_num_layers,
    }


def _virtual_flags(m: MegatronConfig) -> dict[str, int]:
    """Returns the flags for virtual stages that were given."""
    flags: dict[str, int | None] = {
        "--num-virtual-stages-per-pipeline-rank": m.num_virtual_stages_per_pipeline_rank,
        "--virtual-pipeline-model-parallel-size": m.virtual_pipeline_model_parallel_size,
        _PER_STAGE: m.num_layers_per_virtual_pipeline_stage,
    }
    return {name: value for name, value in flags.items() if value is not None}


def build_stages(m: MegatronConfig, num_layers: int) -> Stages:
    """Returns the stages of a model with `num_layers`. `m` has the flags of the Megatron section as attributes.

    Raises ValueError if the layers cannot be divided, or if flags contradict each other.
    """
    ranks = m.pipeline_model_parallel_size
    if (
        ranks <= 1
    ):  # as in Megatron, the other flags have no effect then; `FlagSpec.parse` rejects numbers below 1
        return Stages(((num_layers,),))
    if m.pipeline_model_parallel_layout is not None:
        return _explicit(m, m.pipeline_model_parallel_layout, num_layers)
    counted = _counted(m)
    of_ranks = _with_counted(m, num_layers) if any(counted.values()) else _with_ends(m, num_layers)
    virtual = _virtual(m, of_ranks)
    for rank, n in enumerate(of_ranks):
        if n % virtual:
            raise FlagError(
                "the layers of a pipeline rank",
                f"be a multiple of its {virtual} virtual stages",
                f"{n} layers on rank {rank} of {ranks} ({_describe_layers(m, num_layers)})",
                f"change {next(iter(_virtual_flags(m)))} or the ranks",
            )
    counts = [[n // virtual for n in of_ranks] for _ in range(virtual)]
    first, last = counted.values()
    counts[0][0] -= first
    counts[-1][-1] -= last
    return Stages(tuple(tuple(of_virtual) for of_virtual in counts))


def micro_batch_group(m: MegatronConfig, num_layers: int) -> int:
    """Returns the divisor of the number of micro-batches per rank and step: 1 without virtual stages."""
    ranks = m.pipeline_model_parallel_size
    if build_stages(m, num_layers).virtual == 1:
        return 1
    group = m.microbatch_group_size_per_virtual_pipeline_stage or ranks
    if group < ranks:
        raise FlagError(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "be at least --pipeline-model-parallel-size",
            f"{group} and {ranks}",
            "leave it out",
        )
    return group


def virtual_flag(m: MegatronConfig, num_layers: int) -> str | None:
    """Returns the flag that gives pipeline ranks several virtual stages. Returns None if each rank has one."""
    return next(iter(_virtual_flags(m)), _LAYOUT) if build_stages(m, num_layers).virtual > 1 else None


def check_stages(m: MegatronConfig, num_layers: int) -> None:
    """Raises ValueError if the pipeline cannot run a model with `num_layers`."""
    two = micro_batch_group(m, num_layers) > 1 and m.pipeline_model_parallel_size == 2
    if two and not m.overrides.get("overlap_p2p_comm", True):
        raise FlagError(
            "--no-overlap-p2p-communication",
            "be left out for virtual stages on 2 pipeline ranks",
            "it",
            "megatron-core would mix up the messages of the two directions",
        )


def _with_ends(m: MegatronConfig, num_layers: int) -> list[int]:
    """Returns the layers per rank. --decoder-first/last-pipeline-num-layers set the first and last rank; the other
    ranks share the rest equally."""
    ranks = m.pipeline_model_parallel_size
    ends = zip((0, ranks - 1), _ends(m).values(), strict=True)
    stated = {rank: layers for rank, layers in ends if layers is not None}
    rest, others = num_layers - sum(stated.values()), ranks - len(stated)
    if min(stated.values(), default=1) < 1 or rest < others or (rest % others if others else rest):
        raise FlagError(
            "--pipeline-model-parallel-size",
            "deal the model's layers out equally",
            f"{ranks} stages for {_describe_layers(m, num_layers)}",
            "change the number of stages or what the first and last ones have, or give "
            "--pipeline-model-parallel-layout",
        )
    return [stated.get(rank, rest // max(others, 1)) for rank in range(ranks)]


def _with_counted(m: MegatronConfig, num_layers: int) -> list[int]:
    """Returns the layers per rank, if the embedding or the loss counts as a layer."""
    ranks, counted = m.pipeline_model_parallel_size, [name for name, on in _counted(m).items() if on]
    if both := [name for name, layers in _ends(m).items() if layers is not None]:
        raise ValueError(
            f"{counted[0]} must be given without {both[0]}, got both; each sets the number of layers of a rank: leave "
            "out one of the two"
        )
    positions = num_layers + len(counted)
    if positions % ranks or positions == ranks:
        raise FlagError(
            "--pipeline-model-parallel-size",
            f"divide the model's layers and {' and '.join(counted)}",
            f"{ranks} stages for {num_layers} + {len(counted)} = {positions}",
            "change the number of stages, or give --pipeline-model-parallel-layout",
        )
    return [positions // ranks] * ranks


def _virtual(m: MegatronConfig, of_ranks: Sequence[int]) -> int:
    """Returns the number of virtual stages per rank."""
    stated = _virtual_flags(m)
    if len(stated) > 1:
        raise ValueError(
            f"{' and '.join(stated)} must not be given together, got {' and '.join(map(str, stated.values()))}; each "
            "sets the number of virtual stages of a rank: leave one"
        )
    if _PER_STAGE not in stated:
        return next(iter(stated.values()), 1)
    layers = stated[_PER_STAGE]
    if len(set(of_ranks)) > 1 or of_ranks[0] % layers:
        raise FlagError(
            _PER_STAGE,
            "divide the layers of every pipeline rank, which must be equal",
            f"{layers} for {', '.join(map(str, of_ranks))} layers",
            "use --num-virtual-stages-per-pipeline-rank or change the ranks",
        )
    return of_ranks[0] // layers


def _describe_layers(m: MegatronConfig, num_layers: int) -> str:
    ends = zip(("first", "last"), _ends(m).values(), strict=True)
    stated = ", ".join(f"{layers} on the {end}" for end, layers in ends if layers is not None)
    return f"{num_layers} layers" + (f", of which {stated}" if stated else "")


def _explicit(m: MegatronConfig, text: str, num_layers: int) -> Stages:
    """Returns the stages of a layout string."""
    ranks = m.pipeline_model_parallel_size
    others: dict[str, object] = {**_counted(m), **_ends(m), **_virtual_flags(m)}
    if also := [name for name, value in others.items() if value]:
        raise ValueError(
            f"{_LAYOUT} must be given without {', '.join(also)}, got both; the layout has every stage: leave the other "
            "out"
        )
    stages = expand(text)
    counts = [stage.count("t") for stage in stages]
    rules = {
        f"have a number of stages that is a multiple of --pipeline-model-parallel-size {ranks}": not len(
            stages
        )
        % ranks,
        "name only E (embedding), t (layer), L (loss)": not set("".join(stages)) - set("EtL"),
        "begin with E and end with L, each once": re.fullmatch("E[^EL]*L", "".join(stages)) is not None,
        f"have the model's {num_layers} layers": sum(counts) == num_layers,
        "have at least one letter per stage": all(stages),
    }
    shown = text if text == "|".join(stages) else f"{text} = {'|'.join(stages)}"
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(
                f"{_LAYOUT} must {rule}, got {shown} ({len(stages)} stages, {sum(counts)} layers); write one stage "
                "after the other with | between them, as in Ett|ttt|ttL"
            )
    return Stages(tuple(tuple(counts[i : i + ranks]) for i in range(0, len(counts), ranks)))


def expand(text: str) -> list[str]:
    """Returns the stages of a layout string, with repetitions written out: "Et*2|(tt|)*2L" -> ["Ett", "tt", "tt",
    "L"]."""
    text = text.replace(",", "").replace(" ", "")
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([^()*])\*(\d+)"):
        text = re.sub(repeated, lambda m: m[1] * int(m[2]), text)
    return text.split("|")
