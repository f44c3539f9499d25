"""The processed images of a rollout on the hosts of the trainer ranks.

Train data names images by the paths of their files. If the hosts share the folder HF_DATASETS_CACHE, each rank reads
these files. Otherwise a rank gets the content of missing files from the actor of the rollouts, through Ray's object
store, and keeps it in its own host's folder. So each image is sent to a host once.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from slime.records.errors import FlagError
from slime.types import TrainData
from slime.vision.inputs import ImageInputs, MediaFile
from slime.vision.store import MediaStore, open_store

SOURCE = "image_source"
"""Key of train data with images: the name of the actor that has their files."""
COLUMN = "multimodal_train_inputs"
_AT_ONCE = 32
"""Number of files per call, which bounds the memory of a call."""
_BACK_S = 60.0
"""Seconds in which a lost actor must have started again."""

Fetch = Callable[[list[str]], list[bytes]]
"""Returns the content of files on the host of the rollouts."""


def with_source(data: TrainData) -> TrainData:
    """Adds the name of the calling actor, which must have a method `read_images`, to data with images."""
    if not _images(data):
        return data
    return {**data, SOURCE: ray.get_runtime_context().get_actor_name()}


def with_files(data: TrainData) -> TrainData:
    """Returns the data with images whose files this host has. Missing files come from the actor of `with_source`."""
    source = data.get(SOURCE)
    if source is None:
        return data
    rest = {name: column for name, column in data.items() if name != SOURCE}
    return localize(rest, lambda paths: _fetch(str(source), paths), open_store)


def _fetch(name: str, paths: list[str]) -> list[bytes]:
    """Returns the content of the files on the actor's host. Waits for an actor that is starting again."""
    end = time.monotonic() + _BACK_S
    while True:
        try:
            found: list[bytes] = ray.get(ray.get_actor(name).read_images.remote(paths))
            return found
        except (RayActorError, ValueError) as error:  # Ray's ValueError: no actor has this name
            if isinstance(error, FlagError) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def localize(data: TrainData, fetch: Fetch, store: Callable[[], MediaStore]) -> TrainData:
    """Returns the data with images whose files exist. Calls neither `fetch` nor `store` if all files exist."""
    missing = {item.key: item for item in _images(data) if not os.path.exists(item.path)}
    if not missing:
        return data
    kept = store()
    found = {key: stored.item for key in missing if (stored := kept.find(key)) is not None}
    waiting = (item for key, item in missing.items() if key not in found)
    while items := list(itertools.islice(waiting, _AT_ONCE)):
        for item, content in zip(items, fetch([item.path for item in items]), strict=True):
            found[item.key] = kept.receive(item.key, content).item
    inputs = [_moved(one, found) if isinstance(one, ImageInputs) else one for one in data[COLUMN]]
    return {**data, COLUMN: inputs}


def read_files(paths: Sequence[str]) -> list[bytes]:
    """Returns the content of files of this host. Raises ValueError that names the file and the host."""
    try:
        return [Path(path).read_bytes() for path in paths]
    except OSError as error:
        raise FlagError(
            "HF_DATASETS_CACHE",
            "keep the processed images while a run uses them",
            f"{error.filename} on host {socket.gethostname()} ({error.strerror})",
            "do not empty the folder during a run",
        ) from error


def _images(data: TrainData) -> list[MediaFile]:
    column = data.get(COLUMN) or ()
    return [item for inputs in column if isinstance(inputs, ImageInputs) for item in inputs.items]


def _moved(inputs: ImageInputs, found: dict[str, MediaFile]) -> ImageInputs:
    paths = {key: item.path for key, item in found.items()}
    return ImageInputs(tuple(replace(item, path=paths.get(item.key, item.path)) for item in inputs.items))
