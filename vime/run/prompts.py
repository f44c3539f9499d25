"""The prompts of a run, before anything starts: `vime train` reads all of them, `vime plan` the first part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.config import Config
from slime.config.sections.data import DataConfig
from slime.data.drawing.mixing import DataSet
from slime.data.prompts import Prompts
from slime.data.source import load_training_prompts
from slime.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from slime.hooks import load_function
from slime.rollout.data_source import training_label_check
from slime.rollout.eval_datasets import EvalDatasetConfig, read_eval_prompts, resolve_eval_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLANNED_BYTES = 32 << 20
"""What `vime plan` reads of each file. Most prompt files are smaller, and a second start remembers the checks."""


def plural(number: int, word: str) -> str:
    """2, "rank" -> "2 ranks"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def with_data(config: Config) -> Config:
    """Read the prompts once before anything starts: bad lines fail here, and --num-epoch becomes --num-rollout."""
    for _ in _evaluation(config):
        pass
    if config.data.disable_rollout_global_dataset or config.debug.load_debug_rollout_data:
        return config
    source = load_function(config.data.data_source_path, flag="--data-source-path")(config.namespace())
    if config.data.num_rollout is not None:
        return config
    return config.with_values(num_rollout=_rollouts(config, len(source)))


def prompts(c: Config) -> Iterator[str]:
    """The prompt files as a run reads them, so that what `vime train` refuses is an error here."""
    read = c
    if bare := tokenizer_fingerprint(c.rollout.hf_checkpoint) is None:
        # A plan needs config.json only. Without a tokenizer, nothing is rendered or counted.
        none = dict.fromkeys(("rollout_max_prompt_len", "rollout_max_context_len"))
        read = c.with_values(apply_chat_template=False, hf_checkpoint="", **none)
    if c.data.prompt_data and not (c.data.disable_rollout_global_dataset or c.debug.load_debug_rollout_data):
        yield from _training(c, read)
    for data, found in _evaluation(read, most_bytes=PLANNED_BYTES):
        number = plural(len(found) + found.unread, "prompt")
        yield (
            f"evaluation {data.name}: {number} x {data.n_samples_per_eval_prompt} responses{_part_of(found)}"
        )
    if bare:
        yield (
            f"chat template and prompt lengths are not checked: {c.rollout.hf_checkpoint} has no tokenizer here"
        )


def _training(c: Config, read: Config) -> Iterator[str]:
    batch, name, part = c.data.rollout_batch_size, c.data.prompt_data, ""
    if c.data.data_source_path == DataConfig.data_source_path:
        found = load_training_prompts(read, training_label_check(read), most_bytes=PLANNED_BYTES)
        sizes = [len(its) + its.unread for _, its in found]
        number, part = sum(sizes), _part_of(found[0][1])
        if len(found) > 1:
            yield from _mixed(found, sizes, batch)
            name, part = "all data sets", ""
    else:
        number = len(load_function(c.data.data_source_path, flag="--data-source-path")(c.namespace()))
    yield f"{name}: {plural(number, 'prompt')} = {number / batch:.4g} rollouts an epoch{part}"
    if c.data.num_rollout is None:
        yield f"--num-epoch {c.data.num_epoch} = {_rollouts(c, number)} rollouts"


def _mixed(found: Sequence[tuple[DataSet, Prompts]], sizes: Sequence[int], batch: int) -> Iterator[str]:
    """A line for each of several data sets: its share, and after how many rollouts it begins again."""
    weights = [
        size if one.weight is None else one.weight for (one, _), size in zip(found, sizes, strict=True)
    ]
    for (one, its), size, weight in zip(found, sizes, weights, strict=True):
        share = weight / sum(weights)
        yield (
            f"{one.name} {one.path}: {plural(size, 'prompt')}, {share:.3g} of each batch, again after "
            f"{size / (share * batch):.4g} rollouts{_part_of(its)}"
        )


def _part_of(found: Prompts) -> str:
    if not found.unread:
        return ""
    return (
        f"; only the first {len(found)} were checked here ({PLANNED_BYTES >> 20} MiB), vime train checks all"
    )


def _rollouts(c: Config, number: int) -> int:
    epochs, batch = c.data.num_epoch, c.data.rollout_batch_size
    assert epochs is not None, "a rule requires it without --num-rollout"
    if (rollouts := number * epochs // batch) == 0:
        raise ValueError(
            f"--num-epoch must give at least one rollout, got {epochs} x {number} prompts for --rollout-batch-size "
            f"{batch}; raise it"
        )
    return rollouts


def _evaluation(c: Config, most_bytes: int | None = None) -> Iterator[tuple[EvalDatasetConfig, Prompts]]:
    @functools.cache
    def tokenizer() -> PreTrainedTokenizerBase:
        return load_tokenizer(c.rollout.hf_checkpoint, trust_remote_code=c.train.trust_remote_code)

    for data in resolve_eval_datasets(c):
        if not c.rollout.hf_checkpoint:
            data = dataclasses.replace(
                data, apply_chat_template=False, max_prompt_len=None, max_context_len=None
            )
        yield data, read_eval_prompts(c, data, tokenizer, most_bytes=most_bytes)
