"""Functions that plug-ins of upstream vime call for vLLM's /v1/chat/completions/render, which returns the ids and the
processed images of a conversation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence


def _mm_render_response_to_generate_body(render_data: object, model: str) -> dict[str, object]:
    """Returns the body of a request to /inference/v1/generate, without its `sampling_params`, from an answer of
    /v1/chat/completions/render. Raises ValueError for an answer without ids."""
    if not isinstance(render_data, Mapping) or not isinstance(render_data.get("token_ids"), list):
        raise ValueError(
            f"render_data must be an answer of /v1/chat/completions/render with token_ids, got {render_data!r:.80}; "
            "pass the JSON of the answer"
        )
    return {"model": model, **copy.deepcopy(dict(render_data))}


def _align_mm_feature_placeholders_to_tokens(
    generate_body: dict[str, object], token_ids: Sequence[int]
) -> None:
    """Moves the placeholders of `generate_body` to the same ids in `token_ids`, in their order. Raises ValueError if
    `token_ids` lacks the ids of an image."""
    features, rendered = generate_body.get("features"), generate_body.get("token_ids")
    if not isinstance(features, Mapping) or not isinstance(rendered, list):
        return
    images = [image for each in features["mm_placeholders"].values() for image in each or ()]
    wanted, start = list(token_ids), 0
    for number, image in enumerate(sorted(images, key=lambda one: int(one["offset"]))):
        length = int(image["length"])
        own = rendered[image["offset"] : image["offset"] + length]
        found = range(start, len(wanted) - length + 1)
        at = next((index for index in found if wanted[index : index + length] == own), None)
        if at is None:
            raise ValueError(
                f"token_ids must have the {length} ids of image {number} after id {start}, got none; make the ids with "
                "the processor of the checkpoint"
            )
        image["offset"], start = at, at + length
