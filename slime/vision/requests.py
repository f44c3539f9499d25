"""The images of a request to an engine."""

from __future__ import annotations

from typing import TypedDict

from slime.vision.inputs import ImageInputs, TrainInputs


class RequestImages(TypedDict, total=False):
    """Argument of a request to an engine."""

    images: ImageInputs


def request_images(inputs: TrainInputs | None) -> RequestImages:
    """Returns the argument `images` of `RolloutEngine.generate` and `score`. Empty for a prompt without images, so that
    an engine of text needs no such argument.

    Example::

        result = await engine.generate(sample.tokens, params, **request_images(sample.multimodal_train_inputs))
    """
    if not inputs:
        return {}
    if not isinstance(inputs, ImageInputs):
        raise ValueError(
            f"multimodal_train_inputs must be references to processed images for a request to an engine, got tensors "
            f"{sorted(inputs)}; pass await GenerateState(args).reference_images(sample)"
        )
    return {"images": inputs} if inputs.items else {}
