"""Tests random conversations in five chat formats: a session sends its own tokens, and the format's text for the new
messages. No request may lose the tokens that the model wrote."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_formats import FORMATS, Format, published
from rollout_double import make_args, make_state
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.protocols import GenerateResult
from slime.rollout.context import RunContext
from slime.sessions.messages import ChatRequest, Reply, ToolCall, assistant, tool_call
from slime.sessions.session import MODEL, Session, SessionLimits
from slime.types import Sample

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "sums",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
    },
}
WORDS = [
    "the",
    "sum",
    "\n",
    "\n\n",
    " ",
    "is",
    "{x}",
    '"q"',
    "été",
    "数",
    "</think>",
    "{{ y }}",
    "1+1",
    "<tool_call>",
    "a\tb",
    "\\n",
    "'s",
]


def tokenizer_of(chat: Format, template: str) -> PreTrainedTokenizerFast:
    """Makes a byte-level BPE whose merges cross the ends of words and lines, so that a text split at another position
    has other tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(0)
    raw.train_from_iterator([text(rng, 30) + "\n\n" + text(rng, 9) for _ in range(50)], trainer)
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in chat.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=chat.eos, bos_token=chat.special[0], chat_template=template
    )


def text(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(1, longest)))


class Conversation:
    """A random model and a random client. `expected` is the whole text so far, by the format."""

    def __init__(self, chat: Format, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.chat, self.tokenizer, self.rng = chat, tokenizer, random.Random(seed)
        self.expected: str | None = None
        self.said = ""
        self.reply = Reply(None)
        self.written: list[int] = []
        self.sent: list[int] = []
        self.tools = True

    def parse(self, *_: object) -> Reply:
        return self.reply

    async def generate(self, token_ids: list[int], params: Any, **others: object) -> GenerateResult:
        """Returns the model's answer: any text, with the parts that a parser would find."""
        self.check(token_ids)
        rng, chat = self.rng, self.chat
        number = rng.randint(1, chat.calls) if chat.tools and rng.random() < 0.4 else 0
        calls: list[dict[str, object]] = [
            {"name": "add", "arguments": {"a": rng.randint(-9, 99)}} for _ in range(number)
        ]
        thought = text(rng, 5).replace("</think>", "") if rng.random() < 0.5 else ""
        content = "" if calls and rng.random() < 0.5 else text(rng, 6)
        cut = rng.random() < 0.1
        end = "" if cut else rng.choice(chat.call_ends if calls else chat.ends)
        self.said = chat.answer(thought, content, calls) + end
        made = (ToolCall("add", json.dumps(call["arguments"]), f"c{n}") for n, call in enumerate(calls))
        self.reply = Reply(content or None, thought or None, tuple(made))
        ids = self.pieces(self.said)
        self.written += ids
        self.sent = token_ids + ids
        self.expected = self.tokenizer.decode(token_ids) + self.said
        closing = chat.closing[bool(calls)] if cut else chat.glue
        self.between = closing
        return GenerateResult(ids, [-1.0] * len(ids), self.said, "length" if cut else "stop", [0])

    def pieces(self, said: str) -> list[int]:
        """Returns tokens that the tokenizer would not have chosen, because a model may split a text anywhere."""
        whole = self.tokenizer.encode(said, add_special_tokens=False)
        found = []
        for token in whole:
            piece = self.tokenizer.convert_ids_to_tokens(token)
            if (
                len(piece) > 1
                and token not in self.tokenizer.added_tokens_decoder
                and self.rng.random() < 0.3
            ):
                found += self.tokenizer.convert_tokens_to_ids(list(piece))
            else:
                found.append(token)
        return found

    def check(self, prompt: list[int]) -> None:
        if self.expected is None:
            return
        assert prompt[: len(self.sent)] == self.sent, "the tokens of the conversation changed"
        assert self.tokenizer.decode(prompt) == self.expected

    def next_messages(self) -> list[dict[str, Any]]:
        """Returns the client's own copy of the answer, and its new messages."""
        rng, chat, reply = self.rng, self.chat, self.reply
        calls = [
            tool_call(call.name, call.arguments, rng.choice([call.id, "own"])) for call in reply.tool_calls
        ]
        content = reply.content
        if content is not None and rng.random() < 0.3:
            content = content.strip()
        added: list[dict[str, Any]] = [assistant(content, calls, rng.choice([None, reply.reasoning]))]
        following = ""
        if calls:
            results = [text(rng, 4) for _ in calls]
            added += [{"role": "tool", "content": said, "tool_call_id": "c"} for said in results]
            following += chat.results(results)
        if not calls or rng.random() < 0.2:
            asked = text(rng, 8)
            added.append({"role": "user", "content": asked})
            following += chat.user(asked)
        end = next((x for x in chat.special if self.said.endswith(x)), None)
        if end is not None and not self.between and following.startswith(end):
            following = following.removeprefix(end)  # the model has written the opening of the next message
        assert self.expected is not None
        self.expected += self.between + following + chat.opening
        return added


async def talk(conversation: Conversation, state: Any) -> None:
    rng, chat = conversation.rng, conversation.chat
    session = Session(
        RunContext.from_state(state),
        Sample(prompt="", index=0),
        {"max_new_tokens": 999},
        SessionLimits(),
        conversation,
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(rng, 8)}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": text(rng, 8)})
    tools = [TOOL] if chat.tools and (rng.random() < 0.8) else []
    for _ in range(rng.randint(2, 6)):
        await session.answer(ChatRequest(MODEL, list(messages), tools))
        messages += conversation.next_messages()
    (sample,) = session.samples()
    assert sample.metadata["session"]["prefix_mismatch"] == 0
    assert sample.tokens == conversation.sent
    response = sample.tokens[-sample.response_length :]
    assert [t for t, on in zip(response, sample.loss_mask, strict=True) if on] == conversation.written


def converse(chat: Format, template: str, conversations: int) -> None:
    tokenizer = tokenizer_of(chat, template)
    args = make_args()
    state = make_state(args, tokenizer)

    async def run() -> None:
        for seed in range(conversations):
            state.engine = conversation = Conversation(chat, tokenizer, seed)  # type: ignore[assignment]
            try:
                await talk(conversation, state)
            except Exception as error:
                raise AssertionError(f"{chat.name}, conversation {seed}: {error!r}") from error

    try:
        state.run(run())
    finally:
        state.engine = None


@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
def test_tokens_do_not_drift(chat: Format) -> None:
    converse(chat, chat.template, 40)


@pytest.mark.slow
@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
def test_tokens_do_not_drift_in_1000_conversations(chat: Format) -> None:
    converse(chat, chat.template, 1000)
    if (template := published(chat.published)) is not None:
        converse(chat, template, 1000)
