"""Leaves out samples whose prompt is too long, for data sources of plug-ins."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from slime.data.rows import render_chat
from slime.data.tokenizer import prompt_lengths
from slime.types import Sample
from slime.vision.processor import MediaProcessor, list_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


def filter_long_prompt(
    samples: list[Sample],
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    max_length: int | None,
) -> list[Sample]:
    """Returns the samples whose prompt has at most `max_length` tokens (None: any number). Logs the number of dropped
    samples. With `processor`, the ids of images count."""
    if max_length is None:
        return samples
    raw = [isinstance(s.prompt, str) and s.apply_chat_template_kwargs is None for s in samples]
    texts = [
        sample.prompt
        if isinstance(sample.prompt, str)
        else render_chat(
            sample.prompt, tokenizer, sample.apply_chat_template_kwargs or {}, sample.metadata.get("tools")
        )
        for sample in samples
    ]
    if processor is not None:
        media = MediaProcessor(processor)
        texts = [
            media.expand(
                text, *(list_media(sample.multimodal_inputs or {}, kind) for kind in ("images", "videos"))
            )[0]
            for sample, text in zip(samples, texts, strict=True)
        ]
    lengths = prompt_lengths(texts, raw, tokenizer)
    kept = [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_length]
    if len(kept) < len(samples):
        logger.warning(
            "%d of %d prompts exceed %d tokens and are left out",
            *(len(samples) - len(kept), len(samples), max_length),
        )
    return kept
