"""The data source draws prompts from files, epoch after epoch, and has a buffer for groups that return unfinished.

The data source owns the position in the data and the numbering of groups and samples. It saves both as JSON for a
restart.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.algo.losses import MASKED_ROLLOUTS, SFT_ROLLOUT, loss_for
from slime.config.foreign_rewards import any_foreign
from slime.config.schema import Config, read_section
from slime.config.sections.data import DataConfig
from slime.config.sections.reward import RewardConfig
from slime.data.drawing.curriculum import PROMPT, PassRates
from slime.data.drawing.mixing import SOURCE, DataSet, Joined, Mixture, Order, data_sets
from slime.data.drawing.position import VERSION, read_state, state_path, write_state
from slime.data.limits.context import ContextLimits, find_lowest, prompt_limit
from slime.data.limits.conversations import Masks
from slime.data.media.check import check_for
from slime.data.prompts import LabelCheck, Prompts, load_prompts
from slime.data.rows import RowColumns
from slime.data.tokenizer import require_template_reads, shared_tokenizer
from slime.hooks import load_function
from slime.records.errors import FlagError
from slime.types import Prompt, Sample, SampleGroup

PromptLocation = list[int]
"""The location of a drawn prompt: the index of its data set, its first and its last visit, and the index of the prompt.
A visit is epoch x prompts + position. --curriculum passed over the visits before the last one."""


class PromptDataSource:
    """Supplies groups of `--n-samples-per-prompt` samples, first from the buffer and then from `--prompt-data`.

    The order is deterministic: `slime.data.drawing.mixing` chooses the next prompt, and `slime.data.drawing.curriculum`
    chooses the prompts that --curriculum leaves out. Samples of a named data set have the name in
    `metadata["data_source"]`, unless the metadata column of their row has a value for that key. `Sample.index` and
    `Sample.group_index` count up over the whole run and never repeat. With --disable-rollout-global-dataset, the
    samples are empty and the rollout function supplies its own prompts. Without --prompt-data, the source has only the
    groups that `add_samples` put into the buffer.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.buffer: list[SampleGroup] = []
        config = Config.from_args(args)
        rollout, data = config.rollout, config.data
        found: list[tuple[DataSet, Prompts]] = []
        if data.prompt_data and not data.disable_rollout_global_dataset:
            found = load_training_prompts(config, self.label_check(config))
        self.data_sets = [one for one, _ in found]
        self.prompts = Joined([prompts for _, prompts in found])
        seed, shuffle = rollout.rollout_seed, rollout.rollout_shuffle
        self.orders = [Order(len(prompts), seed=seed, shuffle=shuffle) for _, prompts in found]
        weights = [float(len(prompts)) if one.weight is None else one.weight for one, prompts in found]
        self.mixture = Mixture(self.orders, weights, [str(one.name) for one in self.data_sets], seed)
        keep = data.curriculum
        self.pass_rates = None if keep is None else PassRates(len(self.prompts), keep, seed)
        self.next_group_index = 0
        self.next_index = 0
        self.snapshot: dict[str, str] = {}
        """The run's id and the path of its snapshots (`slime.rollout.stream.snapshots`). The saved state contains
        both."""
        self._locations: dict[int, PromptLocation] = {}
        self._buffer_filter = pop_oldest if rollout.buffer_sort_by_staleness else pop_first
        if rollout.buffer_filter_path:
            self._buffer_filter = load_function(rollout.buffer_filter_path, flag="--buffer-filter-path")

    def label_check(self, config: Config) -> LabelCheck | None:
        """Returns a check that raises ValueError for a wrong label while the file is read, or None. Subclasses override
        this method."""
        return None

    def __len__(self) -> int:
        """Returns the number of prompts in all data sets."""
        return len(self.prompts)

    @property
    def epoch(self) -> int:
        """Returns the current epoch of the first data set."""
        return self.orders[0].epoch if self.orders else 0

    @property
    def position(self) -> int:
        """Returns the position in the current epoch of the first data set."""
        return self.orders[0].position if self.orders else 0

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """Records the rewards of finished groups for --curriculum. A group that is passed several times counts once."""
        if self.pass_rates is not None:
            self.pass_rates.observe(groups, read_section(RewardConfig, self.args).reward_key)

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of --curriculum. They include the number of prompts that it left out since the last
        call."""
        return {} if self.pass_rates is None else self.pass_rates.take_metrics()

    def get_samples(self, num_groups: int) -> list[SampleGroup]:
        """Returns the next `num_groups` groups. Groups from the buffer come first and keep their tokens."""
        groups = list(self._buffer_filter(self.args, None, self.buffer, num_groups)) if self.buffer else []
        if len(groups) > num_groups:
            raise FlagError(
                "--buffer-filter-path",
                f"return at most the {num_groups} groups asked for",
                len(groups),
                "leave the rest in the buffer",
            )
        return groups + [self._next_group() for _ in range(num_groups - len(groups))]

    def get_locations(self, numbers: Sequence[int]) -> list[PromptLocation | None]:
        """Returns the locations of the groups' prompts, for the journal. The location is None if an earlier call
        returned it, or if the group has no prompt from the data."""
        return [self._locations.pop(number, None) for number in numbers]

    def add_samples(self, groups: list[SampleGroup]) -> None:
        """Puts groups back into the buffer. Each group must have `--n-samples-per-prompt` samples."""
        for group in groups:
            if len(group) != self.args.n_samples_per_prompt:
                raise FlagError(
                    "a group in the buffer",
                    f"have --n-samples-per-prompt {self.args.n_samples_per_prompt} samples",
                    len(group),
                    "return whole groups",
                )
        self.buffer.extend(groups)

    def state_dict(self, outstanding: Sequence[SampleGroup] = ()) -> dict[str, object]:
        """Returns the position, the numbering and the buffered samples as plain values, which are copies. The groups in
        `outstanding` come before the groups in the buffer."""
        buffer = [*outstanding, *self.buffer]
        more: dict[str, object] = {}
        if len(self.orders) > 1:
            every = zip(self.data_sets, self.orders, self.mixture.weights, strict=True)
            more["data_sets"] = [[one.name, order.size, weight] for one, order, weight in every]
            more["orders"] = [[order.epoch, order.position, order.draws] for order in self.orders]
        if self.pass_rates is not None:
            more["pass_rates"] = self.pass_rates.state_dict()
        if self.snapshot:
            more["snapshot"] = dict(self.snapshot)
        return {
            **more,
            "version": VERSION,
            "num_prompts": len(self.prompts),
            "rollout_seed": self.args.rollout_seed,
            "rollout_shuffle": self.args.rollout_shuffle,
            "epoch": self.epoch,
            "position": self.position,
            "next_group_index": self.next_group_index,
            "next_index": self.next_index,
            "buffer": copy.deepcopy([[sample.to_dict() for sample in group] for group in buffer]),
        }

    def load_state_dict(self, state: Mapping[str, Any], where: str = "the saved data position") -> None:
        """Sets the position, the numbering and the buffer to those in `state`. Raises ValueError if `state` belongs to
        other prompts or to another order."""
        now = self.state_dict()
        if state.get("version") == 1:  # Version 1 has no checksum. Its other fields are the same.
            state = {**state, "version": VERSION}
        names = {
            "version": "the format version",
            "num_prompts": "the number of prompts in --prompt-data",
            "rollout_seed": "--rollout-seed",
            "rollout_shuffle": "--rollout-shuffle",
            "data_sets": "name, number of prompts and weight of each data set of --prompt-data",
        }
        for key, name in names.items():
            if state.get(key) != now.get(key):
                raise FlagError(
                    name,
                    f"be what {where} was written with ({state.get(key)})",
                    now.get(key),
                    "restore it, or start the data anew with --start-rollout-id 0 and another --save",
                )
        epoch, position = state["epoch"], state["position"]
        saved = state.get("orders", [[epoch, position, epoch * len(self) + position]])
        for order, location in zip(self.orders, saved, strict=False):
            order.epoch, order.position, order.draws = location
        if self.pass_rates is not None and "pass_rates" in state:
            self.pass_rates.load_state_dict(state["pass_rates"])
        self.snapshot = dict(state.get("snapshot", {}))
        self.next_group_index, self.next_index = state["next_group_index"], state["next_index"]
        self.buffer = [
            [Sample.from_dict(sample) for sample in group] for group in copy.deepcopy(state["buffer"])
        ]

    def save(self, rollout_id: int, outstanding: Sequence[SampleGroup] = ()) -> None:
        """Writes the state atomically to `{--save}/rollout/data_state_{rollout_id}.json`, if --save is given.

        `outstanding` are the groups that were drawn and are in no batch. A resumed run draws these groups first.
        The caller must call `save` after it has generated rollout `rollout_id`, before it starts the next rollout.
        """
        if self.args.save is None:
            return
        state = (
            self.state_dict(outstanding) if outstanding else self.state_dict()
        )  # A plug-in's `state_dict` may have no parameter.
        write_state(state_path(self.args.save, rollout_id), state)

    def load(self, rollout_id: int) -> None:
        """Loads the state after rollout `rollout_id` from the checkpoint at --load. With -1, or without --load, the
        source stays at the beginning."""
        if self.args.load is None or rollout_id < 0:
            return
        path = state_path(self.args.load, rollout_id)
        if (
            not path.is_file()
            and (slime := path.with_name(f"global_dataset_state_dict_{rollout_id}.pt")).is_file()
        ):
            self.load_state_dict(self._read_slime_state(slime), where=str(slime))
            return
        if not path.is_file():
            raise FlagError(
                "--load",
                f"hold the data position of rollout {rollout_id}",
                f"no {path}",
                "resume another checkpoint, or start the data anew with --start-rollout-id 0 and "
                "another --save",
            )
        self.load_state_dict(read_state(path), where=str(path))

    def _read_slime_state(self, path: Path) -> dict[str, object]:
        """Returns the state from a file that slime saved. slime visits the prompts in the same order and saves no
        buffer."""
        import torch

        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)  # ok: tensors and numbers only
            epoch, position, index = (saved[name] for name in ("epoch_id", "sample_offset", "sample_index"))
        except Exception as error:  # border: damaged files raise any error
            raise FlagError(
                path,
                "hold the data position that slime saved",
                f"{type(error).__name__}: {error}",
                "restore it, or start the data anew with --start-rollout-id 0 and another --save",
            ) from error
        if len(self.orders) > 1:
            raise FlagError(
                "--prompt-data",
                f"be one data set to continue {path}",
                len(self.orders),
                "start the data anew with --start-rollout-id 0 and another --save",
            )
        groups = saved.get("sample_group_index", index // self.args.n_samples_per_prompt)
        if not position <= len(self.prompts):
            raise FlagError(
                "--prompt-data",
                f"have at least the {position} prompts that {path} has seen",
                len(self.prompts),
                "restore it, or start the data anew with --start-rollout-id 0 and another --save",
            )
        seen = {"epoch": epoch, "position": position, "next_group_index": groups, "next_index": index}
        return {**self.state_dict(), **seen, "buffer": []}

    def _next_group(self) -> SampleGroup:
        prompt, location = self._next_prompt()
        if location is not None:
            self._locations[self.next_group_index] = location
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = Sample(
                prompt=copy.deepcopy(prompt.text),
                label=copy.deepcopy(prompt.label),
                metadata=copy.deepcopy(prompt.metadata),
                group_index=self.next_group_index,
                index=self.next_index,
                multimodal_inputs=prompt.multimodal_inputs(),
            )
            if self.args.apply_chat_template or not isinstance(prompt.text, str):
                sample.apply_chat_template_kwargs = dict(self.args.apply_chat_template_kwargs)
            group.append(sample)
            self.next_index += 1
        self.next_group_index += 1
        return group

    def _next_prompt(self) -> tuple[Prompt, PromptLocation | None]:
        if not self.prompts and read_section(DataConfig, self.args).disable_rollout_global_dataset:
            return Prompt(text=""), None
        if not self.prompts:
            raise FlagError(
                "--prompt-data", "name a prompt file", "none", "or pass --disable-rollout-global-dataset"
            )
        number, rates = self.mixture.next(), self.pass_rates
        start, order = self.prompts.starts[number], self.orders[number]

        def passes_over(index_in_set: int, epoch: int) -> bool:
            return rates is not None and rates.passes_over(start + index_in_set, epoch)

        first = order.visits
        index = start + order.next(passes_over)
        location = [number, first, order.visits - 1, index]
        prompt, added = self.prompts[index], dict[str, object]()
        if (name := self.data_sets[number].name) is not None:
            added[SOURCE] = name
        if rates is not None:
            added[PROMPT] = index
        if added:
            prompt = dataclasses.replace(prompt, metadata={**added, **prompt.metadata})
        return prompt, location


def load_training_prompts(
    c: Config, check_label: LabelCheck | None, *, most_bytes: int | None = None
) -> list[tuple[DataSet, Prompts]]:
    """Returns the prompts of --prompt-data per data set, with the columns, the template and the limits that the flags
    set. `load_prompts` describes `most_bytes`. Without --hf-checkpoint, no prompt is rendered or counted."""
    data, checkpoint = c.data, c.rollout.hf_checkpoint
    if not data.prompt_data:
        raise FlagError(
            "--prompt-data", "name a prompt file", "none", "or pass --disable-rollout-global-dataset"
        )
    masked = c.rollout.rollout_function_path in MASKED_ROLLOUTS
    of_prompt, of_context = c.rollout.rollout_max_prompt_len, c.rollout.rollout_max_context_len
    limit = find_lowest(of_prompt, of_context) if masked else prompt_limit(of_prompt, of_context)

    tokenizer = functools.partial(shared_tokenizer, checkpoint, trust_remote_code=c.train.trust_remote_code)
    if checkpoint and data.apply_chat_template_kwargs:
        require_template_reads(data.apply_chat_template_kwargs, tokenizer(), "--apply-chat-template-kwargs")
    context = None
    if checkpoint and loss_for(c.algorithm).rewarded:  # an engine continues the prompts
        context = ContextLimits.of(c, tokenizer)
    columns = RowColumns(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        chosen_key=data.chosen_key if loss_for(c.algorithm).pairs else None,
        rejected_key=data.rejected_key if loss_for(c.algorithm).pairs else None,
        apply_chat_template=data.apply_chat_template and not masked,  # the loss mask renders a conversation
        apply_chat_template_kwargs=dict(data.apply_chat_template_kwargs),
        conversations=c.rollout.rollout_function_path == SFT_ROLLOUT,
        multimodal_keys=dict(data.multimodal_keys or {}),
        whole_rows=any_foreign(c.reward.custom_rm_path, c.reward.rm_type),
    )
    read = functools.partial(
        load_prompts,
        columns=columns,
        tokenizer=tokenizer() if data.apply_chat_template or limit is not None else None,
        max_prompt_len=limit,
        context=context,
        check_label=check_label,
        conversations=c.rollout.rollout_function_path == SFT_ROLLOUT,
        masks=Masks.of(c, tokenizer(), columns) if masked and checkpoint else None,
        most_bytes=most_bytes,
        media=check_for(c),
    )
    # The data set's name replaces the value of a column "data_source". A row's metadata replace both.
    named = dataclasses.replace(columns, left_out=(SOURCE,))
    return [(one, read(one.path, columns=columns if one.name is None else named)) for one in data_sets(data)]


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Returns the groups that have waited longest, and removes them from the buffer (the default
    --buffer-filter-path)."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def pop_oldest(
    args: Namespace, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Returns the groups with the stalest tokens, and removes them from the buffer (--buffer-sort-by-staleness).

    Groups are sorted by the oldest weight version of their tokens, then by the earliest rollout of their tokens. Groups
    without either come last. Groups with equal keys keep their order.
    """
    buffer.sort(key=_oldest_tokens)
    return pop_first(args, rollout_id, buffer, num_samples)


def _oldest_tokens(group: SampleGroup) -> tuple[float, float]:
    """Returns the oldest weight version and the earliest rollout of a group's tokens, or infinity for an unknown
    value."""
    versions = [int(v) for sample in group for v in sample.weight_versions if str(v).isdecimal()]
    rollouts = [s.metadata["start_rollout_id"] for s in group if "start_rollout_id" in s.metadata]
    return min(versions, default=math.inf), min(rollouts, default=math.inf)
