"""Makes the references of a sample's images from a plug-in's tensors, or again if their files are gone."""

from __future__ import annotations

from collections.abc import Mapping

from slime.checkpoints.hf_config import read_hf_config
from slime.models import read_decoder
from slime.records.errors import FlagError
from slime.vision.inputs import ImageInputs, TrainInputs
from slime.vision.processor import MediaProcessor


def lacks_references(inputs: TrainInputs | None) -> bool:
    """Returns true for a plug-in's tensors, and for references whose files are gone. A sample that waited in a saved
    buffer may have such references."""
    return bool(inputs) and not (isinstance(inputs, ImageInputs) and inputs.exist())


def make_references(
    inputs: TrainInputs | None, sources: Mapping[str, object], media: MediaProcessor, checkpoint: str
) -> ImageInputs:
    """Returns references to files that exist. `sources` are the lists `images` and `videos` of the sample. Raises
    ValueError for a model without a vision tower, and for tensors that do not fit each other."""
    if isinstance(inputs, ImageInputs):
        return media.restore(inputs, sources)
    vision = read_decoder(read_hf_config(checkpoint)).vision
    if vision is None:
        raise FlagError(
            "multimodal_train_inputs",
            "be None for a model without a vision tower",
            sorted(inputs or {}),
            "train a model with a vision tower, or leave the images out",
        )
    from slime.data.media.media import list_media  # imports torch, which the driver does not need

    return ImageInputs(
        tuple(
            media.keep(one.kind, one.key, one.read(), tokens=one.tokens, grid=one.grid)
            for one in list_media(inputs, vision)
        )
    )
