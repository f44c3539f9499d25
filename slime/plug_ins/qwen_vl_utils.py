"""The function of the package qwen-vl-utils that slime's plug-ins import, for an environment without this package.

`import qwen_vl_utils` finds this module if nothing else has the name (`slime.system.upstream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.plug_ins import media


def process_vision_info(
    conversations: Sequence[object], image_patch_size: int = 14
) -> tuple[list[object] | None, list[object] | None]:
    """Returns the images and the videos of a conversation, or of a list of conversations. Without an image (or a
    video), the result has None instead of the list.

    An image is a PIL image in RGB with its original size. The real package resizes an image to whole patches. Here, the
    model's processor does this. `image_patch_size` is not read.
    """
    whole = [one for each in conversations for one in ([each] if isinstance(each, Mapping) else each)]  # type: ignore[attr-defined]
    found = media.process_vision_info(whole, None)
    images, videos = found["images"], found["videos"]
    assert (images is None or isinstance(images, list)) and (videos is None or isinstance(videos, list))
    return images, videos
