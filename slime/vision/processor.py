"""A model's own processor turns images and videos into tensors, and expands their markers in the prompt's text.

Each processor processes each distinct image once, in a separate call, and stores the result (`slime.vision.store`). The
token ids of a prompt are those of transformers' processor for the whole prompt.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from slime.bridges.processors import allow_no_torchvision
from slime.records.errors import FlagError
from slime.system.cache_folder import CACHE
from slime.system.disk_space import DiskSpaceGuard
from slime.vision.inputs import ImageInputs, MediaFile, MediaKind
from slime.vision.runs import locate
from slime.vision.store import StoredMedia, open_store

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

    from slime.vision.images import PromptImage

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a checkpoint with a processor. A checkpoint has at least one of the first two."""
_TEXT_NAMES = frozenset(
    ["input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets"]
)
"""The names of a processor's outputs that belong to the text."""
_PROBE_PIXELS = 64


def load_processor(name_or_path: str, *, trust_remote_code: bool = False) -> ProcessorMixin | None:
    """Returns the processor of a checkpoint, or None for a checkpoint without a processor."""
    path = Path(name_or_path)
    if path.exists() and not any((path / name).is_file() for name in _FILES):
        return None
    allow_no_torchvision()
    from transformers import AutoProcessor, ProcessorMixin

    load: Callable[..., object] = AutoProcessor.from_pretrained
    try:
        found = load(str(name_or_path), trust_remote_code=trust_remote_code, local_files_only=path.exists())
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise FlagError(
            "--hf-checkpoint",
            "hold a processor that transformers can load",
            f"{name_or_path} ({error})",
            f"check {_FILES[0]}, or pass --trust-remote-code if it needs code of its own",
        ) from error
    if not isinstance(found, ProcessorMixin):
        return None
    if (images := getattr(found, "image_processor", None)) is not None:
        images.return_tensors = "pt"  # the default of processors with torchvision, which plug-ins rely on
    return found


class MediaProcessor:
    """Expands prompts with a processor of transformers. Several threads may call it.

    Example::

        media = MediaProcessor(load_processor("/models/Qwen2.5-VL-3B-Instruct"))
        text, inputs = media.expand("<|vision_start|><|image_pad|><|vision_end|>How many?", images=[image])
    """

    def __init__(self, processor: ProcessorMixin, folder: Path | None = None) -> None:
        self.processor = processor
        self._store = open_store(folder)
        self._folder = self._store.folder
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @functools.cached_property
    def identity(self) -> str:
        """Returns the digest of the settings that change an image's tensors."""
        import transformers

        parts: list[object] = [transformers.__version__, type(self.processor).__qualname__]
        for name in ("image_processor", "video_processor"):
            if (one := getattr(self.processor, name, None)) is not None:
                parts += [type(one).__qualname__, one.to_dict()]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def marker(self, kind: MediaKind) -> str | None:
        """Returns the text that marks one image or video in a rendered prompt, or None if the processor has no
        marker."""
        return getattr(self.processor, f"{kind}_token", None)

    def expand(
        self, text: str, images: Sequence[object] = (), videos: Sequence[object] = ()
    ) -> tuple[str, ImageInputs]:
        """Returns `text` with the processor's text for each marker, and the processed images. Raises ValueError unless
        the text has one marker per image and video."""
        expansion = Expansion(self, images, videos)
        return expansion.expand(text), expansion.finish()

    def restore(self, inputs: ImageInputs, sources: Mapping[str, object]) -> ImageInputs:
        """Returns the same images with files that exist. `sources` are the lists `images` and `videos`."""
        found = [self.process("image", value).item for value in list_media(sources, "images")]
        found += [self.process("video", value).item for value in list_media(sources, "videos")]
        items = {item.key: item for item in found}
        return ImageInputs(
            tuple(replace(items.get(item.key, item), start=item.start) for item in inputs.items)
        )

    def keep(
        self, kind: MediaKind, key: str, tensors: Mapping[str, Tensor], *, tokens: int, grid: tuple[int, ...]
    ) -> MediaFile:
        """Stores the tensors of an image that a plug-in has processed, and returns their reference."""
        stored = self._store.find(key) or self._store.write(kind, key, tensors, tokens=tokens, grid=grid)
        return stored.item

    def locate(self, inputs: ImageInputs, tokens: Sequence[int]) -> ImageInputs:
        """Returns the images with their first token in `tokens`, which no model has sampled."""
        return locate(inputs, tokens, {kind: self._ids(kind) for kind in ("image", "video")})

    def process(self, kind: MediaKind, value: object) -> StoredMedia:
        """Returns a processed image or video. The store has earlier results."""
        content = _image(value) if kind == "image" else _video(value)
        key = hashlib.blake2b(
            f"{kind} {self.identity} {_digest(content)}".encode(), digest_size=16
        ).hexdigest()
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            stored = self._store.find(key) or self._process(kind, key, content)
        with self._guard:
            self._locks.pop(key, None)
        return stored

    def _process(self, kind: MediaKind, key: str, content: object) -> StoredMedia:
        text, tensors = self._call(kind, content)
        grids = tensors.get(f"{kind}_grid_thw")
        grid = () if grids is None else tuple(grids[0].tolist())
        with DiskSpaceGuard(CACHE, self._folder, "the processed images"):
            return self._store.write(
                kind, key, tensors, tokens=self._count(kind, self.encode(text)), grid=grid, text=text
            )

    def _call(self, kind: MediaKind, content: object) -> tuple[str, dict[str, Tensor]]:
        """Calls the processor for one image or video, in a prompt that is its marker. Returns the text that replaces
        the marker, and the tensors."""
        call: Callable[..., Mapping[str, object]] = self.processor
        media: dict[str, object] = {f"{kind}s": [content], "text": [self.marker(kind)]}
        try:
            with _decoded(content):
                out = call(**media, return_tensors="pt", return_text_replacement_offsets=True)
        except ValueError as error:
            raise FlagError(
                "an image" if kind == "image" else "a video",
                "be one that the model's processor accepts",
                str(error),
                "change it, or leave it out",
            ) from error
        ((replaced,),) = cast("list[list[dict[str, str]]]", out["text_replacement_offsets"])
        tensors = {name: cast("Tensor", value) for name, value in out.items() if name not in _TEXT_NAMES}
        return replaced["replacement"], tensors

    def _count(self, kind: MediaKind, ids: list[int]) -> int:
        """Returns the number of the ids that the model replaces by features."""
        return sum(ids.count(one) for one in self._ids(kind))

    def _ids(self, kind: MediaKind) -> list[int]:
        found: list[int] = getattr(self.processor, f"{kind}_token_ids", [])
        return found

    def count_tokens(self, image: PromptImage) -> int:
        """Returns the number of tokens that an image adds to its prompt in the place of the marker, from the image's
        size alone. Raises ValueError for a size that the processor does not accept."""
        width, height = image.size
        try:
            found = self._count_sizes(image_sizes=[(height, width)])
        except ValueError as error:
            raise FlagError(
                "an image",
                "have a size that the model's processor accepts",
                f"{width} x {height} pixels ({error})",
                "crop it, or leave the row out",
            ) from error
        return int(found["num_image_tokens"][0]) + self._around

    @functools.cached_property
    def _count_sizes(self) -> Callable[..., Mapping[str, list[int]]]:
        """Returns the processor's function that counts tokens from sizes. vLLM calls it, too."""
        found: Callable[..., Mapping[str, list[int]]] = getattr(self.processor, "_get_num_multimodal_tokens")  # noqa: B009
        return found

    @functools.cached_property
    def _around(self) -> int:
        """Returns the number of ids in the text of an image in addition to the ids of the image."""
        import PIL.Image

        text, _ = self._call("image", PIL.Image.new("RGB", (_PROBE_PIXELS, _PROBE_PIXELS)))
        ids = self.encode(text)
        return len(ids) - self._count("image", ids)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without the tokenizer's opening."""
        ids: list[int] = self.processor.tokenizer.encode(text, add_special_tokens=False)
        return ids


class Expansion:
    """The expansion of a rendered text that is tokenised in several parts, such as the turns of a conversation."""

    def __init__(self, media: MediaProcessor, images: Sequence[object], videos: Sequence[object]) -> None:
        self._media = media
        every: dict[MediaKind, Sequence[object]] = {"image": images, "video": videos}
        self._waiting = {kind: list(values) for kind, values in every.items() if values}
        self._markers = {str(media.marker(kind)): kind for kind in self._waiting}
        self._found: list[StoredMedia] = []

    def expand(self, text: str) -> str:
        """Returns the next part of the text with the processor's text for each marker."""
        if not self._markers:
            return text
        return re.sub("|".join(map(re.escape, self._markers)), self._replacement, text)

    def _replacement(self, match: re.Match[str]) -> str:
        kind = self._markers[match[0]]
        if not self._waiting[kind]:
            raise self._wrong_number(kind, "more")
        self._found.append(self._media.process(kind, self._waiting[kind].pop(0)))
        return self._found[-1].text

    def finish(self, tokens: Sequence[int] = ()) -> ImageInputs:
        """Returns the processed images, with their indices in the `tokens` of the whole text. Raises ValueError if the
        text had fewer markers than images."""
        for kind, left in self._waiting.items():
            if left:
                raise self._wrong_number(kind, f"{len(left)} fewer")
        return self._media.locate(ImageInputs(tuple(one.item for one in self._found)), tokens)

    def _wrong_number(self, kind: MediaKind, got: str) -> FlagError:
        return FlagError(
            "a rendered prompt",
            f"have one {self._media.marker(kind)} per {kind}",
            f"{got} than its {kind}s",
            f"write <{kind}> where each {kind} belongs, and use a chat template that renders {kind}s",
        )


def list_media(inputs: Mapping[str, object], name: str) -> list[object]:
    """Returns the entries of `images` or `videos` in `Sample.multimodal_inputs`."""
    found = inputs.get(name)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def _image(value: object) -> PromptImage:
    from slime.vision.images import open_image  # imports Pillow, which the first commands do without

    return open_image(value)


def _decoded(content: object) -> AbstractContextManager[None]:
    from slime.vision.images import PromptImage

    return content.decoded() if isinstance(content, PromptImage) else nullcontext()


def _video(value: object) -> object:
    """Returns a video in a form that a processor reads: a path, or a list of frames."""
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("video")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_image(frame) for frame in value]
    if isinstance(value, str):
        return value
    raise FlagError("a video", "be a path or a list of frames", type(value).__name__, "fix the row")


def _digest(content: object) -> str:
    if (digest := getattr(content, "digest", None)) is not None:
        return str(digest)
    if isinstance(content, list):
        return " ".join(map(_digest, content))
    path = Path(str(content))
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise FlagError(
            "a video",
            "be a file that can be read",
            f"{path} ({error.strerror})",
            "restore it, or fix the row",
        ) from error
