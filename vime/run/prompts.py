"""Reads the prompts of a run before anything starts: `vime train` reads all prompts, `vime plan` the first part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.algo.losses import held_out, loss_for
from slime.config import Config
from slime.config.sections.data import DataConfig
from slime.data.drawing.mixing import DataSet
from slime.data.prompts import Prompts
from slime.data.rows import message_text
from slime.data.source import load_training_prompts
from slime.data.tokenizer import shared_tokenizer, tokenizer_fingerprint
from slime.hooks import load_function
from slime.records.errors import FlagError
from slime.rollout.eval_datasets import EvalDatasetConfig, read_eval_prompts, resolve_eval_datasets
from slime.rollout.rewards.labels import training_label_check
from slime.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Score = Callable[..., str | None]
"""Type of `vime.start.dry_reward.check_reward`."""
_OTHER_VOCABULARIES = (
    "vocab.txt",
    "*.tiktoken",
    "tiktoken*",
    "tekken.json",
    "spiece.model",
    "sentencepiece*",
)
"""Files of tokenizers that `tokenizer_fingerprint` does not read."""
PLANNED_BYTES = 32 << 20
"""Number of bytes that `vime plan` reads from each file. Most prompt files are smaller, and a second start reuses the
results of the checks."""


def plural(number: int, word: str) -> str:
    """Returns "2 ranks" for 2 and "rank"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def with_data(config: Config, score: Score | None = None) -> Config:
    """Reads the prompts once before anything starts, so that bad lines fail early, and turns --num-epoch into
    --num-rollout.

    `score` checks the reward with each data set's first prompt.
    """
    read = _without_tokenizer(config) or config
    for data, found in _evaluation(read):
        if read is config:
            _evaluation_reward(config, data, found, score)
    if config.data.disable_rollout_global_dataset or config.debug.load_debug_rollout_data:
        return config
    own = config.data.data_source_path == DataConfig.data_source_path
    source = load_function(config.data.data_source_path, flag="--data-source-path")(
        (read if own else config).namespace()
    )
    if own and read is config:
        _training_reward(config, source.prompts, score)
    if config.data.num_rollout is not None:
        return config
    return config.with_values(num_rollout=_rollouts(config, len(source)))


def prompts(c: Config, score: Score | None = None) -> Iterator[str]:
    """Reads the prompt files as a run does, so that prompts that `vime train` refuses are an error here. For `score`,
    see `with_data`."""
    read = _without_tokenizer(c) or c
    bare = read is not c
    if c.data.prompt_data and not (c.data.disable_rollout_global_dataset or c.debug.load_debug_rollout_data):
        yield from _training(c, read, score)
    for data, found in _evaluation(read, most_bytes=PLANNED_BYTES):
        if not bare and (note := _evaluation_reward(c, data, found, score)):
            yield note
        size = len(found) + found.unread
        if held_out(c):
            what = plural(size, "pair" if loss_for(c.algorithm).pairs else "conversation")
            yield f"held-out set {data.name}: {what}, in micro-batches as large as in training{_unread_note(found)}"
            continue
        number = plural(size, "prompt")
        yield (
            f"evaluation {data.name}: {number} x {data.n_samples_per_eval_prompt} responses{_unread_note(found)}"
        )
    if bare:
        yield (
            f"chat template and prompt lengths are not checked: {c.rollout.hf_checkpoint} has no tokenizer here"
        )


def _without_tokenizer(c: Config) -> Config | None:
    """Returns flags with which prompts are read but not rendered or counted, for a model without a tokenizer or a
    folder, else None.

    The plan of a run on another machine needs no tokenizer. Other checks report a missing tokenizer or folder.
    """
    if c.rollout.hf_checkpoint is not None:
        folder = Path(c.rollout.hf_checkpoint)
        others = any(next(folder.glob(pattern), None) for pattern in _OTHER_VOCABULARIES)
        if others or tokenizer_fingerprint(str(folder)) is not None:
            return None
    none = dict.fromkeys(("rollout_max_prompt_len", "rollout_max_context_len"))
    return c.with_values(apply_chat_template=False, hf_checkpoint="", **none)


def _training(c: Config, read: Config, score: Score | None) -> Iterator[str]:
    batch, name, part = c.data.rollout_batch_size, c.data.prompt_data, ""
    if c.data.data_source_path == DataConfig.data_source_path:
        found = load_training_prompts(read, training_label_check(read), most_bytes=PLANNED_BYTES)
        sizes = [len(its) + its.unread for _, its in found]
        number, part = sum(sizes), _unread_note(found[0][1])
        if (note := _cells(read, found)) is not None:
            yield note
        if read.rollout.hf_checkpoint and (note := _training_reward(c, found[0][1], score)):
            yield note
        if len(found) > 1:
            yield from _mixed(found, sizes, batch)
            name, part = "all data sets", ""
    else:
        number = len(load_function(c.data.data_source_path, flag="--data-source-path")(c.namespace()))
    yield f"{name}: {plural(number, 'prompt')} = {number / batch:.4g} rollouts an epoch{part}"
    if number < batch:
        yield f"--rollout-batch-size {batch} is above the {plural(number, 'prompt')}: a rollout has some more than once"
    if c.data.num_rollout is None:
        yield f"--num-epoch {c.data.num_epoch} = {_rollouts(c, number)} rollouts"


def _cells(c: Config, found: Sequence[tuple[DataSet, Prompts]]) -> str | None:
    """Returns a note on the first data set whose cells are the JSON texts of chat messages."""
    for one, its in found if c.data.apply_chat_template else ():
        for where, row in its.first(1):
            text = row.get(c.data.input_key)
            if where.source.suffix == ".csv" and message_text(text):
                column = f"column {c.data.input_key!r}"
                return f"{one.path}: {column} holds chat messages as JSON text, which are read as messages"
    return None


def _mixed(found: Sequence[tuple[DataSet, Prompts]], sizes: Sequence[int], batch: int) -> Iterator[str]:
    """Yields a line for each of several data sets: its share, and the number of rollouts after which it starts
    again."""
    weights = [
        size if one.weight is None else one.weight for (one, _), size in zip(found, sizes, strict=True)
    ]
    for (one, its), size, weight in zip(found, sizes, weights, strict=True):
        share = weight / sum(weights)
        yield (
            f"{one.name} {one.path}: {plural(size, 'prompt')}, {share:.3g} of each batch, again after "
            f"{size / (share * batch):.4g} rollouts{_unread_note(its)}"
        )


def _training_reward(c: Config, found: Sequence[Prompt], score: Score | None) -> str | None:
    if score is None or not len(found):
        return None
    return score(c, found[0], functools.partial(_tokenizer, c))


def _evaluation_reward(
    c: Config, data: EvalDatasetConfig, found: Sequence[Prompt], score: Score | None
) -> str | None:
    if score is None or not len(found):
        return None
    first = dataclasses.replace(found[0], metadata={**found[0].metadata, **data.metadata_overrides})
    own = {"custom_rm_path": data.custom_rm_path, "rm_type": data.rm_type}
    changed = data.custom_generate_function_path
    if changed:
        c = c.with_values(custom_generate_function_path=changed)
    return score(c, first, functools.partial(_tokenizer, c), **own, where=f"evaluation dataset {data.name}: ")


def _tokenizer(c: Config) -> PreTrainedTokenizerBase:
    return shared_tokenizer(c.rollout.hf_checkpoint, trust_remote_code=c.train.trust_remote_code)


def _unread_note(found: Prompts) -> str:
    if not found.unread:
        return ""
    return (
        f"; only the first {len(found)} were checked here ({PLANNED_BYTES >> 20} MiB), vime train checks all"
    )


def _rollouts(c: Config, number: int) -> int | None:
    """Returns the number of rollouts, or None without the flags that a rule requires, so that one report has the errors
    of flags and data."""
    epochs, batch = c.data.num_epoch, c.data.rollout_batch_size
    if epochs is None or batch is None:
        return None
    if (rollouts := number * epochs // batch) == 0:
        raise FlagError(
            "--num-epoch",
            "give at least one rollout",
            f"{epochs} x {number} prompts for --rollout-batch-size {batch}",
            "raise it",
        )
    return rollouts


def _evaluation(c: Config, most_bytes: int | None = None) -> Iterator[tuple[EvalDatasetConfig, Prompts]]:
    tokenizer = functools.partial(_tokenizer, c)
    for data in resolve_eval_datasets(c):
        if not c.rollout.hf_checkpoint:
            data = dataclasses.replace(
                data, apply_chat_template=False, max_prompt_len=None, max_context_len=None
            )
        yield data, read_eval_prompts(c, data, tokenizer, most_bytes=most_bytes)
