"""Checks the images of rows while a file is read, and counts their tokens from their sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from slime.algo.losses import loss_for
from slime.bridges.processors import has_torchvision
from slime.config.schema import Config
from slime.data.files import RowLocation
from slime.records.errors import FlagError
from slime.types import Prompt
from slime.vision.inputs import MediaKind
from slime.vision.processor import MediaProcessor, load_processor

if TYPE_CHECKING:
    from slime.vision.images import PromptImage


@dataclass(frozen=True)
class MediaCheck:
    """The checks of one model. The text of the record is part of the cache's key."""

    checkpoint: str
    identity: str
    """Digest of the processor's settings."""
    trust_remote_code: bool = False
    most_images: int | None = None
    """Largest number of images that an engine takes in one prompt, or None."""
    most_videos: int | None = None
    limit_flag: str = ""

    def check(self, prompt: Prompt, where: RowLocation) -> None:
        """Raises ValueError with file and line for an image that the model or an engine cannot use."""
        for kind, found, most in (
            ("image", prompt.images, self.most_images),
            ("video", prompt.videos, self.most_videos),
        ):
            if most is not None and len(found) > most:
                raise FlagError(
                    f"{where}: a prompt",
                    f"have at most {most} {kind}s ({self.limit_flag})",
                    len(found),
                    f"raise {self.limit_flag}, or leave the row out",
                )
        if prompt.videos and not has_torchvision():
            raise FlagError(
                f"{where}: a prompt",
                "have videos only if torchvision is installed, because the processors of videos need it",
                f"{len(prompt.videos)} without torchvision",
                "install torchvision for this torch, or give single frames as images",
            )
        if isinstance(prompt.text, str):
            self._check_markers(
                prompt.text, {"image": len(prompt.images), "video": len(prompt.videos)}, where
            )
        from slime.vision.images import PromptImage, check_pixels

        for number, image in enumerate(prompt.images):
            assert isinstance(image, PromptImage)
            try:
                check_pixels(image)
                self._processor.count_tokens(image)
            except FlagError as error:
                raise error.after(f"{where}: image {number + 1} of the prompt: ") from error

    def _check_markers(self, text: str, counts: Mapping[MediaKind, int], where: RowLocation) -> None:
        for kind, count in counts.items():
            marker = self._processor.marker(kind)
            found = 0 if marker is None else text.count(marker)
            if found != count:
                raise FlagError(
                    f"{where}: a prompt of text",
                    f"have one {marker} per {kind}",
                    f"{found} for {count} {kind}s",
                    f"write <{kind}> where each {kind} belongs, and use a chat template that renders {kind}s",
                )

    def count_images(self, prompt: Prompt) -> int:
        """Returns the number of tokens of the images beyond one marker each."""
        count = self._processor.count_tokens
        return sum(count(cast("PromptImage", image)) - 1 for image in prompt.images)

    def count_added(self, prompt: Prompt) -> int:
        """Returns the number of tokens of the images and videos beyond one marker each."""
        process, encode = self._processor.process, self._processor.encode
        return self.count_images(prompt) + sum(
            len(encode(process("video", video).text)) - 1 for video in prompt.videos
        )

    @property
    def _processor(self) -> MediaProcessor:
        return _load(self.checkpoint, self.trust_remote_code)


def check_for(c: Config) -> MediaCheck | None:
    """Returns the checks for the images of the policy. Returns None without --multimodal-keys or without a checkpoint.
    Raises ValueError for a model of text."""
    checkpoint, facts = c.rollout.hf_checkpoint, c.engine.engine_facts
    if not c.data.multimodal_keys or not checkpoint:
        return None
    limits = facts.media_limits if loss_for(c.algorithm).rewarded else {}
    return MediaCheck(
        checkpoint,
        _load(checkpoint, c.train.trust_remote_code).identity,
        c.train.trust_remote_code,
        limits.get("image"),
        limits.get("video"),
        facts.flag("media_limits"),
    )


@functools.cache
def _load(checkpoint: str, trust_remote_code: bool) -> MediaProcessor:
    """Loads a processor once per process, because several processes share a check."""
    found = load_processor(checkpoint, trust_remote_code=trust_remote_code)
    if found is None:
        raise FlagError(
            "--multimodal-keys",
            "be used with a model that has an image processor",
            f"{checkpoint}, which has none",
            "train a model with a vision tower, or leave the flag out",
        )
    return MediaProcessor(found)
