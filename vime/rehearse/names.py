"""Checks two kinds of names in the flags of a launch: the tokens that end an answer, and vLLM's parsers.

A wrong name of this kind raises no error in a short run. Another process checks, because it imports vLLM:

    python -P -m vime.rehearse.names ASKED.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.fields import Values
from vime.doctor.finding import Finding, problem, warning
from vime.rehearse.changes import Flags
from vime.rehearse.fitting import SFT
from vime.sglang_api.tables import MAPPED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES_S = 180
SPECIAL = re.compile(r"<[|｜][^<>]+[|｜]>|</s>|<eos>|<end_of_turn>")
"""Texts that are single tokens in the tokenizers that have them."""
ANSWER = "Zebra7"
"""An answer that no chat template contains."""


@dataclass(frozen=True)
class NamesAsked:
    """The names that a launch gives."""

    checkpoint: str | None
    """The folder of the launch's model, None if it has no tokenizer on this machine."""
    stop: list[str]
    stop_token_ids: list[int]
    ends_by_template: bool
    """True if a model answers a conversation of the chat template, so that an answer must end as the template's."""
    own_generate: bool
    template_kwargs: Values
    trust_remote_code: bool
    tools: str | None
    reasoning: str | None


def check_names(flags: Flags, checkpoint: Path | None, folder: Path) -> list[Finding]:
    """Returns the problems of the names in the launch's own flags. `folder` is the rehearsal's folder."""
    generates = flags.value("loss_type") != SFT and not flags.has("debug_train_only")
    asked = NamesAsked(
        checkpoint=None if checkpoint is None else str(checkpoint),
        stop=flags.values("rollout_stop") or [],
        stop_token_ids=[int(word) for word in flags.values("rollout_stop_token_ids") or [] if word.isdigit()],
        ends_by_template=generates and flags.has("apply_chat_template"),
        own_generate=flags.has("custom_generate_function_path"),
        template_kwargs=_template_kwargs(flags),
        trust_remote_code=flags.has("trust_remote_code"),
        tools=_parser_name(flags, "tool_call_parser"),
        reasoning=_parser_name(flags, "reasoning_parser"),
    )
    if checkpoint is None and not asked.tools and not asked.reasoning:
        return []
    (folder / "asked.json").write_text(json.dumps(asdict(asked)), encoding="utf-8")
    log, found = folder / "names.log", folder / "names.json"
    with open(log, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "vime.rehearse.names", str(folder / "asked.json"), str(found)],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=NAMES_S,
        )
    if done.returncode:
        return [warning("names", "the launch's stop tokens and parsers were not checked", f"look at {log}")]
    return [Finding(**one) for one in json.loads(found.read_text(encoding="utf-8"))]


def _template_kwargs(flags: Flags) -> Values:
    """Returns the options of the chat template, and none for a text that is no JSON, which the run refuses."""
    try:
        read = json.loads(flags.value("apply_chat_template_kwargs") or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _parser_name(flags: Flags, name: str) -> str | None:
    """Returns vLLM's name of a parser, also for SGLang's name. `vime plan` refuses an unknown name of SGLang."""
    theirs = flags.value(f"sglang_{name}")
    return flags.value(f"vllm_{name}") or (theirs and MAPPED[name][1].get(theirs))


def find_stop_problems(
    asked: NamesAsked, tokenizer: PreTrainedTokenizerBase, ends: list[int]
) -> Iterator[Finding]:
    """Yields stop texts that no answer contains, and an end of answers at which none stops. `ends` has the ids at which
    the engine ends an answer without the flags."""
    for text in asked.stop:
        if SPECIAL.fullmatch(text.strip()) and len(tokenizer.encode(text, add_special_tokens=False)) > 1:
            found = f"--rollout-stop {text} is no token of the model, so no answer contains it"
            yield problem("stop", found, "take the token with which this model ends an answer")
    if not (asked.ends_by_template and tokenizer.chat_template):
        return
    end = _find_end(tokenizer, asked.template_kwargs)
    token = None if end is None else str(tokenizer.convert_ids_to_tokens(end))
    if end is None or end in {*ends, *asked.stop_token_ids} or token in asked.stop:
        return
    known = ", ".join(str(tokenizer.convert_ids_to_tokens(i)) for i in ends if i < len(tokenizer)) or "none"
    found = f"the chat template ends an answer with {token}, at which no answer stops (stop tokens: {known})"
    remedy = f"give --rollout-stop-token-ids {end}, or correct eos_token_id in generation_config.json"
    # the stop tokens in a generate function are not in the flags
    yield (warning if asked.own_generate else problem)("stop", found, remedy)


def _find_end(tokenizer: PreTrainedTokenizerBase, template_kwargs: Values) -> int | None:
    """Returns the first special token that the chat template puts after an answer. Some templates put it only before
    the next turn."""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    for conversation in (turns, [*turns, turns[0]]):
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_kwargs)
        after = str(text).rpartition(ANSWER)[2]
        for number in tokenizer.encode(after, add_special_tokens=False):
            if number in tokenizer.added_tokens_decoder:
                return int(number)
    return None


def find_end_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Returns the ids at which vLLM ends an answer: the tokenizer's, and those of generation_config.json, or of
    config.json without that file."""
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    source = next(
        (folder / name for name in ("generation_config.json", "config.json") if (folder / name).exists()),
        None,
    )
    read = {} if source is None else json.loads(source.read_text(encoding="utf-8"))
    ids = read.get("eos_token_id", (read.get("text_config") or {}).get("eos_token_id"))
    found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return list(dict.fromkeys(found))


def find_parser_problems(asked: NamesAsked, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Finding]:
    """Yields names of parsers that vLLM does not have, and parsers that do not fit the tokenizer."""
    if not asked.tools and not asked.reasoning:
        return
    from vime.vllm.chat_parser import VllmChatParser, find_parser

    try:
        if tokenizer is None:
            find_parser(asked.tools, asked.reasoning)
        else:
            VllmChatParser(tokenizer, asked.tools, asked.reasoning, {})
    except ValueError as error:
        yield problem("parser", str(error), "")


def main(argv: list[str]) -> None:
    asked = NamesAsked(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    tokenizer, found = None, list[Finding]()
    if asked.checkpoint is not None:
        from slime.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(asked.checkpoint, trust_remote_code=asked.trust_remote_code)
        found += find_stop_problems(asked, tokenizer, find_end_ids(tokenizer, Path(asked.checkpoint)))
    found += find_parser_problems(asked, tokenizer)
    Path(argv[1]).write_text(json.dumps([one.to_json() for one in found]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
