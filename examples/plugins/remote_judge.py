"""A reward from another model: a judge behind HTTP, with one client per process.

    --custom-rm-path remote_judge.score

`args.judge_url` is a key of the file of --custom-config-path.
"""

import asyncio

from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta


class Judge(metaclass=SingletonMeta):
    """Sends at most 8 questions at a time."""

    def __init__(self, args):
        self.url = args.judge_url
        self.semaphore = asyncio.Semaphore(8)

    async def ask(self, question: str) -> str:
        async with self.semaphore:
            answer = await post(self.url, {"text": question, "sampling_params": {"max_new_tokens": 1}})
        return answer["text"]


async def score(args, sample, **kwargs) -> float:
    """Returns 1.0 if the judge's answer starts with "yes"."""
    question = (
        f"{sample.prompt}{sample.response}\nRight answer: {sample.label}\nIs the response right? yes or no:"
    )
    return float((await Judge(args).ask(question)).strip().lower().startswith("yes"))
