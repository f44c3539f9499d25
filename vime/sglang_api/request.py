"""Reads a request to SGLang's POST /generate and translates it into vLLM's sampling parameters. Imports no vLLM.

Every field is served, or is an error with the field's name, because a dropped field would change the samples. Defaults
are SGLang's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from slime.rollout.sampling import NAMES

WRAPPED = "vime_generate"
"""Field of /inference/v1/generate that holds a body of /generate on its way through vllm-router."""
CONTROL_ROUTES = {
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/update_weights_from_disk"),
    ("GET", "/get_weight_version"),
}
"""Routes with which a trainer that uses SGLang's protocol controls an engine."""
ROUTES = {
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    *((method, "/flush_cache") for method in ("GET", "POST")),
    *(("GET", path) for path in ("/health_generate", "/get_model_info", "/model_info")),
    *(("GET", path) for path in ("/get_server_info", "/server_info")),
    *CONTROL_ROUTES,
}

MAX_NEW_TOKENS = 128
"""SGLang's default. null means the number of tokens that fit the engine's context."""

_Above0 = Annotated[float, msgspec.Meta(gt=0)]
_From0 = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` of a request. None means SGLang's default."""

    temperature: _From0 | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    max_new_tokens: _Count | None = MAX_NEW_TOKENS
    min_new_tokens: _Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Token] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: _Above0 | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    seed: _Seed | None = None
    sampling_seed: _Seed | None = None
    # Not served; `_refuse` reports them.
    json_schema: object = None
    regex: object = None
    ebnf: object = None
    structural_tag: object = None
    stop_regex: object = None
    custom_params: object = None


class GenerateFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request."""

    text: str | list[str] | None = None
    input_ids: list[_Token | list[_Token]] | None = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    top_logprobs_num: _Count | None = None  # the engine has the limit
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    lora_path: str | None = None  # the name of an adapter
    # These fields do not change the answer.
    log_metrics: object = None
    priority: object = None
    routing_key: object = None
    model: object = None
    no_logs: object = None
    image_data: str | list[str | list[str]] | None = None
    # Not served; `_refuse` reports them.
    video_data: object = None
    audio_data: object = None
    modalities: object = None
    input_embeds: object = None
    session_params: object = None
    token_ids_logprob: object = None
    return_hidden_states: object = None
    custom_logit_processor: object = None
    background: object = None
    return_bytes: object = None
    return_entropy: object = None


_NO_IMAGES = "this engine takes text and images only"
_REFUSED = {
    "video_data": _NO_IMAGES,
    "audio_data": _NO_IMAGES,
    "modalities": "image_data has images only",
    "input_embeds": "send text or input_ids",
    "session_params": "send the whole prompt; the engine caches prefixes",
    "token_ids_logprob": "use top_logprobs_num",
    "return_hidden_states": "vLLM does not return them",
    "custom_logit_processor": "use logit_bias",
    "background": "the answer comes with the request",
    "return_bytes": _NO_IMAGES,
    "return_entropy": "use top_logprobs_num",
}
_REFUSED_SAMPLING = {
    "json_schema": "generation is not constrained here",
    "regex": "generation is not constrained here",
    "ebnf": "generation is not constrained here",
    "structural_tag": "generation is not constrained here",
    "stop_regex": "use stop",
    "custom_params": "use logit_bias",
}


@dataclass(frozen=True)
class OneRequest:
    """One sample to generate. `params`: vLLM's parameters; without `max_tokens`, the response may fill the context.

    `scored`: the request has log-probs of the prompt only. vLLM generates one token, which the answer omits.
    """

    prompt: str | list[int]
    params: dict[str, Any]
    rid: str | None
    scored: bool = False
    images: tuple[str, ...] = ()
    """The content of the prompt's images, in base64 or as data URLs."""


@dataclass(frozen=True)
class WantedOutput:
    """Requested content of the answers. `prompt_from`: index of the first prompt token with log-probs, or None."""

    log_probs: bool = False
    prompt_from: int | None = None
    top: int = 0
    texts: bool = False
    experts: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """A parsed request. `batched`: the answer is a list. `adapter`: name of the adapter; empty if the request names
    none."""

    each: list[OneRequest]
    wanted: WantedOutput
    stream: bool
    batched: bool
    adapter: str = ""


_decoder = msgspec.json.Decoder(GenerateFields)


def parse(body: bytes) -> GenerateRequest:
    """Returns the samples that a body requests; the `n` samples of a prompt are consecutive. Raises ValueError with the
    field's name."""
    try:
        fields = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(_named(error, body)) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body must be a JSON object of /generate, got {body[:80]!r}: {error}") from None
    _refuse(fields, _REFUSED, "")
    prompts, is_list = _prompts(fields)
    sampling = _one_each("sampling_params", fields.sampling_params or SamplingFields(), len(prompts))
    names = _one_each("rid", fields.rid, len(prompts))
    images = _images(fields.image_data, len(prompts), is_list=is_list)
    each = []
    batched = is_list
    for prompt, entry, name, seen in zip(prompts, sampling, names, images, strict=True):
        _refuse(entry, _REFUSED_SAMPLING, "sampling_params.")
        params = translate(entry)
        count = entry.n or 1
        batched = batched or count > 1
        for copy in range(count):
            own = params if copy == 0 or "seed" not in params else {**params, "seed": params["seed"] + copy}
            named = name if name is None or count == 1 else f"{name}-{copy}"
            each.append(OneRequest(prompt, own, named, entry.max_new_tokens == 0, seen))
    return GenerateRequest(each, _wanted_output(fields), bool(fields.stream), batched, fields.lora_path or "")


def translate(sampling: SamplingFields) -> dict[str, Any]:
    """Returns vLLM's sampling parameters. Raises ValueError for two different seeds."""
    params = {
        theirs: value
        for name, theirs in NAMES.items()
        if (value := getattr(sampling, name)) not in (None, [])
    }
    if sampling.max_new_tokens == 0:
        params["max_tokens"] = 1
    if sampling.seed is not None and sampling.sampling_seed not in (None, sampling.seed):
        raise ValueError(
            f"sampling_params.seed must equal sampling_params.sampling_seed, got {sampling.seed} and "
            f"{sampling.sampling_seed}; send one of them"
        )
    seed = sampling.seed if sampling.seed is not None else sampling.sampling_seed
    return params if seed is None else {**params, "seed": seed}


def _prompts(fields: GenerateFields) -> tuple[list[str | list[int]], bool]:
    text, ids = fields.text, fields.input_ids
    if (text is None) == (ids is None):
        got = "none" if text is None else "both"
        raise ValueError(f"a request must have one of text and input_ids, got {got}; send one of them")
    name, prompt = ("text", text) if ids is None else ("input_ids", ids)
    nested = isinstance(text, list) or (ids is not None and any(isinstance(one, list) for one in ids))
    if ids is not None and nested and not all(isinstance(one, list) for one in ids):
        raise ValueError("input_ids must be token ids or a list of such lists, got a mixture; send one form")
    prompts: list[str | list[int]] = list(prompt) if nested else [prompt]  # type: ignore[arg-type, list-item]
    if not prompts or not all(prompts):
        raise ValueError(f"{name} must not be empty, got {json.dumps(prompt)[:80]}; send a prompt")
    return prompts, nested


def _images(found: str | list[str | list[str]] | None, count: int, *, is_list: bool) -> list[tuple[str, ...]]:
    """Returns the images of each prompt. A single prompt has an image or a list of images; a list of prompts has one of
    these for each prompt."""
    if not found:
        return [()] * count
    entries: list[Any] = _one_each("image_data", found, count) if is_list else [found]
    images = [(one,) if isinstance(one, str) else tuple(one) for one in entries]
    if not all(isinstance(one, str) for own in images for one in own):
        raise ValueError(
            f"image_data must be an image or a list of images for each prompt, got a list in a list for {count} "
            "prompts; send one list of images"
        )
    return images


def _one_each(name: str, value: object, count: int) -> list[Any]:
    if not isinstance(value, list):
        if count > 1 and isinstance(value, str):
            return [f"{value}-{index}" for index in range(count)]
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} must have one entry per prompt, got {len(value)} for {count} prompts; send one for all or "
            "one for each"
        )
    return value


def _wanted_output(fields: GenerateFields) -> WantedOutput:
    start = fields.logprob_start_len
    asked = bool(fields.return_logprob)
    return WantedOutput(
        log_probs=asked,
        prompt_from=start if asked and start is not None and start >= 0 else None,
        top=(fields.top_logprobs_num or 0) if asked else 0,
        texts=bool(fields.return_text_in_logprobs),
        experts=bool(fields.return_routed_experts),
    )


def _refuse(fields: msgspec.Struct, names: dict[str, str], where: str) -> None:
    for name, why in names.items():
        if value := getattr(fields, name):
            raise ValueError(
                f"{where}{name} must be left out, got {type(value).__name__} {str(value)[:40]!r}; {why}"
            )


def _named(error: msgspec.DecodeError, body: bytes) -> str:
    """Returns msgspec's message with the field first: "Expected `int`, got `str` - at `$.a.b`" -> "a.b must be int"."""
    detail = str(error)
    if found := re.fullmatch(r"Object contains unknown field `(.+?)`(?: - at `\$\.?(.*)`)?", detail):
        name = ".".join(filter(None, (found[2], found[1])))
        return f"{name} must be left out, got it; it is no field of /generate that this engine knows"
    if found := re.fullmatch(r"Expected (.+?)(?:, got (.+?))?(?: - at `\$\.?(.*)`)?", detail):
        what, path = found[1].replace("`", ""), found[3] or ""
        return f"{path or 'the body'} must be {what}, got {_value_at(body, path)}"
    return f"the body must be a JSON object of /generate, got {body[:80]!r}: {detail}"


def _value_at(body: bytes, path: str) -> str:
    """Returns the JSON of the value at `path` ("a.b[1]"), shortened."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # msgspec has read it up to the field
        return "another value"
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if name == "...":  # msgspec's name of a key of a dict
            break
        value = value[int(index)] if index.isdigit() else value[name] if name else value
    return json.dumps(value)[:80]
