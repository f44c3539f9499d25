"""Converts chat messages to token ids and a loss mask, and finds the beginning and the end of an assistant's turn.

The tokenizer's own chat template renders the full conversation once. An assistant's turn begins at the position where
the template lets the model continue. A rendering of the messages before the turn shows this position. The turn ends
with the end-of-turn token. So a message that contains the text of a turn marker is not mistaken for a turn. Each part
is tokenised separately, as in a rollout, where the prompt's tokens end exactly before the generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from slime.types import Message, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML = ("<|im_start|>assistant\n", "<|im_end|>")
# --loss-mask-type: (text that opens an assistant's turn, texts that end it)
_MARKERS = {
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3_5": _CHATML,
    "distill_qwen": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gemma4": ("<|turn>model\n", "<turn|>", "<|tool_response>"),  # The second text ends a tool call.
}


_STAND_IN = "\ue000"
"""A character for private use, which ends no turn."""


def tool_rule(tool: object) -> str | None:
    """Returns the rule that a tool's description breaks, as the end of "a tool must ...", or None for a good
    description: a name, a function, or an object with a function. A null field counts as absent."""
    if isinstance(tool, str) and tool:
        return None
    if not isinstance(tool, dict):
        return "be an object or a name"
    function = tool if tool.get("function") is None else tool["function"]
    if not isinstance(function, dict):
        return "have a function that is an object"
    if not isinstance(name := function.get("name"), str) or not name:
        return "have a name that is a text"
    if not isinstance(function.get("description") or "", str):
        return "have a description that is a text"
    return parameters_rule(function.get("parameters"))


def parameters_rule(parameters: object) -> str | None:
    """Returns the rule that a tool's parameters break, in the form of `tool_rule`, or None."""
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        return "have parameters that are an object"
    if not isinstance(parameters.get("properties"), dict | None):
        return "have properties of parameters that are an object"
    return None


def tool_schemas(tools: Tools | None) -> Tools | None:
    """Returns the tools for a chat template. A tool's name becomes a description with this name, because transformers
    only accepts objects. Raises ValueError for tools that are no list of descriptions."""
    if tools is not None and not isinstance(tools, list | tuple):
        raise ValueError(
            f"tools must be a list of descriptions of tools, got {tools!r:.80}; correct the tools of the sample"
        )
    for tool in tools or ():
        if rule := tool_rule(tool):
            raise ValueError(f"a tool must {rule}, got {tool!r:.80}; correct the tools of the sample")
    return tools and [
        {"type": "function", "function": {"name": tool}} if isinstance(tool, str) else tool for tool in tools
    ]


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Returns each mask's number of tokens from the first trained token to the end, or 0 without trained tokens."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Computes the loss masks of conversations for one tokenizer. `tokenizer_type` is a --loss-mask-type."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in _MARKERS:
            raise ValueError(f"--loss-mask-type must be one of {', '.join(_MARKERS)}, got {tokenizer_type}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._opening, *self._ends = _MARKERS[tokenizer_type]

    def get_loss_mask(
        self,
        messages: list[Message],
        tools: Tools | None = None,
        template_kwargs: dict[str, object] | None = None,
        expand: Callable[[str], str] = str,
    ) -> tuple[list[int], list[int]]:
        """Returns (token_ids, loss_mask), both as long as the rendered conversation.

        `expand` is called with the parts of the rendered text in their order. It returns the part with the images' text
        instead of their markers.

        The mask is 1 on the tokens that the model would generate: an assistant's turn after the opening marker, up to
        and including the end-of-turn token. A message with "step_loss_mask": 0 is not trained on. Raises ValueError if
        the template rewrites earlier turns when the conversation grows, because then no single token sequence contains
        all turns.
        """
        text = self._render(messages, tools, template_kwargs)
        shadow = self._shadow(text, messages, tools, template_kwargs)
        token_ids: list[int] = []
        loss_mask: list[int] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._turn_start(messages[:number], text, tools, template_kwargs)
            ends = [at + len(end) for end in self._ends if (at := shadow.find(end, start)) >= 0]
            if start < done or not ends:
                raise ValueError(
                    f"--loss-mask-type {self.tokenizer_type} must match the chat template, got one that does "
                    f"not end message {number} (assistant) with {self._ends[0]!r}; choose this model's family"
                )
            end = min(ends)
            for piece, trained in (
                (text[done:start], 0),
                (text[start:end], message.get("step_loss_mask", 1)),
            ):
                ids = self.tokenizer.encode(expand(piece), add_special_tokens=False)
                token_ids += ids
                loss_mask += [int(trained)] * len(ids)
            done = end
        tail = self.tokenizer.encode(expand(text[done:]), add_special_tokens=False)
        return token_ids + tail, loss_mask + [0] * len(tail)

    def _shadow(
        self,
        text: str,
        messages: list[Message],
        tools: Tools | None,
        template_kwargs: dict[str, object] | None,
    ) -> str:
        """Returns the rendered `text` with other characters where a message holds the text of a marker, so that only
        the template ends turns."""
        for end in self._ends:
            hidden = cast("list[Message]", _replaced(messages, end, _STAND_IN * len(end)))
            if hidden == messages:
                continue
            shadow = self._render(hidden, tools, template_kwargs)
            if len(shadow) != len(text):
                raise ValueError(
                    f"a chat template must render {end!r} inside a message as it renders other text, got one that "
                    "does not; take the marker out of the message"
                )
            messages, text = hidden, shadow
        return text

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Calls the module's function of the same name."""
        return get_response_lengths(loss_masks)

    def _turn_start(
        self,
        before: list[Message],
        text: str,
        tools: Tools | None,
        template_kwargs: dict[str, object] | None,
    ) -> int:
        """Returns the number of characters of `text` that are the model's prompt for the turn after the messages
        `before`."""
        if not before:
            raise ValueError("messages must begin with a system or user turn, got an assistant turn first")
        prompt = self._render(before, tools, {**(template_kwargs or {}), "add_generation_prompt": True})
        if text.startswith(prompt):
            return len(prompt)
        # Some templates open the turn to generate with "<think>", but leave it out of earlier turns.
        prompt = self._render(before, tools, template_kwargs) + self._opening
        if text.startswith(prompt):
            return len(prompt)
        same = next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text))
        raise ValueError(
            "a chat template must render messages the same when more follow, got one that changes what "
            f"precedes message {len(before)} (assistant): {prompt[max(0, same - 20) : same + 40]!r} became "
            f"{text[max(0, same - 20) : same + 40]!r}; split the conversation at this turn"
        )

    def _render(
        self,
        messages: list[Message],
        tools: Tools | None,
        template_kwargs: dict[str, object] | None,
    ) -> str:
        options: dict[str, Any] = {**(template_kwargs or {}), "tokenize": False}
        return str(self.tokenizer.apply_chat_template(messages, tools=tool_schemas(tools), **options))


def _replaced(value: object, text: str, other: str) -> object:
    """Returns a copy of messages in which `other` replaces `text`."""
    if isinstance(value, str):
        return value.replace(text, other)
    if isinstance(value, dict):
        return {name: _replaced(inner, text, other) for name, inner in value.items()}
    return [_replaced(inner, text, other) for inner in value] if isinstance(value, list) else value
