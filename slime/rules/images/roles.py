"""Checks that the reference model, the critic and the teachers of a run with images take the policy's images.

All models of a run read the same ids and the same processed images. So they need towers whose images have the same
patches and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slime.checkpoints.checkpoint_dir import is_hf_directory
from slime.checkpoints.hf_config import read_hf_config
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.models import FAMILIES, read_decoder
from slime.models.vision import Vision, sees_images
from slime.records.errors import FlagError
from slime.roles import POLICY, TEACHER, get_roles
from slime.roles.served import teachers


def check_towers(c: Config) -> None:
    """Raises ValueError for the first model of a run with images that has no tower, or a tower for other images."""
    mine = require_value(c.rollout.hf_checkpoint)
    policy = read_decoder(read_hf_config(mine)).vision if sees_images(c) else None
    if policy is None:
        return
    for flag, directory, own_shape in _list_models(c):
        if (
            Path(directory).resolve() == Path(mine).resolve()
            or not (Path(directory) / "config.json").is_file()
        ):
            continue
        hf = read_hf_config(directory)
        if hf.get("model_type") not in FAMILIES and hf.get("vision_config"):
            continue  # engines serve frozen models of families that cannot be trained
        vision = read_decoder(hf).vision if hf.get("model_type") in FAMILIES else None
        if vision is None:
            raise FlagError(
                flag,
                "name a model with a vision tower, because prompts have images (--multimodal-keys)",
                f"{directory}, a {hf.get('model_type')} without one",
                "use a model of the policy's family",
            )
        if found := next(_find_differences(policy, vision, own_shape=own_shape), None):
            raise FlagError(
                flag,
                "take the images of --hf-checkpoint",
                f"{directory}, a {hf.get('model_type')} with other {found}",
                "use a model of the policy's family",
            )


def _list_models(c: Config) -> Iterator[tuple[str, str, bool]]:
    """Yields flag, directory, and whether the model may have another size than the policy."""
    for domain, model in teachers(c).items():
        if is_hf_directory(model.checkpoint):
            flag = model.spelling.of("--hf-checkpoint") if model.file else f"--opd-teacher-model {domain}"
            yield flag, model.checkpoint, True
    for role in get_roles(c):
        if role is POLICY or role.of_base(c):
            continue
        source = role.resumes(c) or role.source(c)
        flag = "--ref-load" if source.directory == c.checkpoint.ref_load else source.flag
        yield flag, source.directory, role is TEACHER


def _find_differences(policy: Vision, other: Vision, *, own_shape: bool) -> Iterator[str]:
    """Yields what differs for the images of two towers."""
    if (policy.image_id, policy.video_id) != (other.image_id, other.video_id):
        yield f"ids of images, {other.image_id} instead of {policy.image_id}"
    for field, title in (
        ("patch_values", "values per patch"),
        ("merge", "patches per side of a token"),
        ("tokens_per_image", "tokens per image"),
    ):
        ours, theirs = getattr(policy, field), getattr(other, field)
        if ours != theirs:
            yield f"{title}, {theirs} instead of {ours}"
    ways = ("frame_times", "frames_per_second", "axes", "sees_whole_image")
    if any(getattr(policy, field) != getattr(other, field) for field in ways):
        yield "positions of image tokens"
    if not own_shape and _without_settings(policy) != _without_settings(other):
        yield "sizes of the tower"


def _without_settings(vision: Vision) -> Vision:
    """Returns the record without the text of config.json, which versions of transformers write in several ways."""
    return replace(vision, settings={})
