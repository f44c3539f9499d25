"""A user's function may raise anything, never return, or block the event loop, without stopping or slowing the run."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import traceback
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest
from rollout_double import make_args, make_state

from slime import event_loop, user_code
from slime.config.child_environment import NO_KEY
from slime.rollout.generate import generate_and_rm_group
from slime.types import Sample
from slime.utils import http_utils
from vime.pool.asgi import refuse

RELEASE = threading.Event()
ERRORS = {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "CancelledError": asyncio.CancelledError(),
}


@pytest.fixture(autouse=True)
def release():
    """Ends the threads of rewards that never return together with their test."""
    RELEASE.clear()
    yield
    RELEASE.set()


def scored(**flags):
    """Scores one group of four samples in the loop thread that a run uses."""
    args = make_args(**flags)
    state = make_state(args)
    group = [Sample(prompt="q: len=2 :", index=i, group_index=1) for i in range(4)]
    try:
        return state.run(generate_and_rm_group(args, group, state.sampling_params, rollout_id=0))
    finally:
        state.close()


async def raises(args, sample):
    if sample.index == 2:
        raise ERRORS[args.rm_url]
    return 1.0


def raises_in_a_thread(args, sample):
    if sample.index == 2:
        raise ERRORS[args.rm_url]
    return 1.0


async def raises_for_a_group(args, samples):
    raise ERRORS[args.rm_url]


async def raises_in_generation(args, sample, sampling_params):
    raise ERRORS[args.rm_url]


async def never(args, sample):
    await asyncio.Event().wait()


def never_in_a_thread(args, sample):
    RELEASE.wait()


async def slow(args, sample):
    await asyncio.sleep(0.5)
    return 1.0


async def blocks(args, sample):
    time.sleep(0.5)  # a blocking call where await is needed
    return 1.0


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("reward", ["raises", "raises_in_a_thread"])
def test_any_error_of_a_reward_ends_the_rollout_and_names_the_sample(reward, error):
    with pytest.raises(
        RuntimeError, match=rf"reward test_user_code.{reward} failed for sample 2 of group 1: "
    ):
        scored(custom_rm_path=f"test_user_code.{reward}", rm_url=error)


@pytest.mark.parametrize("error", ERRORS)
def test_any_error_of_a_batched_reward_or_a_generate_function(error):
    with pytest.raises(RuntimeError, match=f"the 4 samples from sample 0 of group 1: {error}"):
        scored(custom_rm_path="test_user_code.raises_for_a_group", rm_url=error, group_rm=True)
    with pytest.raises(RuntimeError, match=f"raises_in_generation failed on sample 0 of group 1: {error}"):
        scored(
            custom_rm_path="test_user_code.slow",
            rm_url=error,
            custom_generate_function_path="test_user_code.raises_in_generation",
        )


@pytest.mark.parametrize("reward", ["never", "never_in_a_thread"])
def test_a_reward_that_never_returns_ends_the_rollout(reward):
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=r"sample \d of group 1: it must return within --reward-deadline-s, got no"
    ):
        scored(custom_rm_path=f"test_user_code.{reward}", reward_deadline_s=0.3, failed_samples="end")
    assert time.monotonic() - began < 5


def test_a_slow_reward_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(user_code, "SLOW_REWARD_S", 0.2)
    monkeypatch.setattr(user_code, "_last_warning_s", float("-inf"))
    scored(custom_rm_path="test_user_code.slow", reward_deadline_s=60.0)
    (line,) = [record.getMessage() for record in caplog.records if "has not returned" in record.getMessage()]
    assert "reward test_user_code.slow for sample 0 of group 1" in line
    assert "rewards that run: 4" in line and "--reward-deadline-s 60" in line


def test_a_function_that_blocks_the_event_loop_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.2)
    scored(custom_rm_path="test_user_code.blocks")
    (line,) = [record.getMessage() for record in caplog.records if "blocks all other" in record.getMessage()]
    number = blocks.__code__.co_firstlineno + 1
    assert (
        line.startswith("--custom-rm-path test_user_code.blocks blocks") and f"{__file__}:{number};" in line
    )


def test_a_cancelled_reward_stays_cancelled():
    async def cancelled():
        args = make_args(custom_rm_path="test_user_code.never")
        state = make_state(args)
        sample = Sample(prompt="q: len=2 :", index=0, group_index=1)
        task = asyncio.create_task(generate_and_rm_group(args, [sample], state.sampling_params, rollout_id=0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


class _Refuses(BaseHTTPRequestHandler):
    """A server that answers as the run's router does without the key, or as a foreign server."""

    def do_POST(self):
        body = json.dumps(
            {"error": {"message": NO_KEY if self.path != "/stranger" else "who are you"}}
        ).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """Prints nothing."""


@pytest.fixture
def router():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def with_aiohttp(args, sample, sampling_params):
    session = aiohttp.ClientSession(raise_for_status=True)
    async with session, session.post(f"{args.rm_url}/stranger", json={}) as response:
        return await response.json()


async def reads_the_answer(args, sample, sampling_params):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{args.rm_url}/generate", json={}) as response,
    ):
        answer = json.loads(await response.text())
    sample.response = answer["text"]
    return sample


async def with_urllib(args, sample, sampling_params):
    def ask():
        return urllib.request.urlopen(f"{args.rm_url}/stranger", data=b"{}").read()

    return await asyncio.to_thread(ask)


async def hides_the_cause(args, sample, sampling_params):
    try:
        return await with_urllib(args, sample, sampling_params)
    except OSError as error:
        raise RuntimeError("no answer") from error


async def other_fault(args, sample, sampling_params):
    raise KeyError("text")


KEYLESS = (
    "; the router refused a request without the run's key (401): send it with slime.utils.http_utils.post, which adds "
    "the key (at "
)


@pytest.mark.parametrize("name", ["with_aiohttp", "reads_the_answer", "with_urllib", "hides_the_cause"])
def test_a_client_without_the_key_is_named(router, name):
    """The client's own error, such as KeyError: 'text', would not name the cause."""
    with pytest.raises(RuntimeError, match=rf"{name} failed on sample \d of group 1: ") as error:
        scored(custom_generate_function_path=f"test_user_code.{name}", rm_url=router, rm_type="random")
    assert KEYLESS in str(error.value)


def asks_a_stranger(args, sample):
    urllib.request.urlopen(f"{args.rm_url}/stranger", data=b"{}")


def asks_the_router(args, sample):
    try:
        urllib.request.urlopen(f"{args.rm_url}/generate", data=b"{}")
    except urllib.error.HTTPError as error:
        answer = json.loads(error.read())
    return float(answer["text"])


def test_other_faults_do_not_blame_the_router(router):
    with pytest.raises(RuntimeError) as error:
        scored(custom_generate_function_path="test_user_code.other_fault", rm_type="random")
    assert "router" not in str(error.value)
    for name, blamed in (("asks_a_stranger", False), ("asks_the_router", True)):
        with pytest.raises((RuntimeError, ValueError)) as error:
            scored(custom_rm_path=f"test_user_code.{name}", rm_url=router)
        assert (KEYLESS.removesuffix(" (at ") in str(error.value)) == blamed


def test_the_servers_of_a_run_name_the_function_that_adds_the_key():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(refuse({"type": "http"}, send))
    assert sent[0]["status"] == 401 and json.loads(sent[1]["body"]) == {"error": NO_KEY}
    assert "slime.utils.http_utils.post" in NO_KEY and "need no change" in NO_KEY
    assert http_utils.post


def divides(args, sample):
    """Returns a long response, whose middle the error leaves out."""
    sample.response = "<think>" + "x" * 1000 + "</think> 7"
    return json_value(sample) / 0


def json_value(sample):
    return json.loads("{")


async def divides_async(args, sample):
    return divides(args, sample)


def returns_text(args, sample):
    return "good"


@pytest.mark.parametrize("name", ["divides", "divides_async"])
def test_an_error_of_a_reward_names_line_label_and_response(name):
    """The sample's number alone does not help in the middle of a run."""
    with pytest.raises(ValueError) as error:
        scored(custom_rm_path=f"test_user_code.{name}")
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1)
        if text.strip() == 'return json.loads("{")'
    )
    shown = str(error.value)
    assert f"test_user_code.py:{line}, label None, response '<think>xxx" in shown
    assert shown.endswith("xxx</think> 7')") and len(shown) < 800 and " ... " in shown
    with pytest.raises(ValueError, match=r"return a float \(label None, response '.*'\)$"):
        scored(custom_rm_path="test_user_code.returns_text")


def test_an_error_names_the_line_of_the_users_code(tmp_path, monkeypatch):
    """The line is not in Python, in a library that the user has called, or in this project."""
    lines = ["import json", "", "def parse(text):", "    return json.loads(text)", ""]
    lines += ["async def generate(args, sample, sampling_params):", "    return parse('{')"]
    file = tmp_path / "my_agent.py"
    file.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RuntimeError, match="custom-generate-function-path my_agent.py:generate failed"
    ) as caught:
        scored(custom_generate_function_path="my_agent.py:generate")
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    text = "".join(traceback.format_exception(caught.value)).replace(__file__, user_code.__file__)
    assert frames[-1].filename.endswith("decoder.py")
    assert (
        user_code.find_location_in(text) == user_code.find_location(caught.value.__cause__) == "my_agent.py:4"
    )
    assert user_code.add_location("it failed", text) == "it failed (at my_agent.py:4)"
    assert user_code.add_location(str(caught.value), text) == str(caught.value)


def test_an_error_without_a_line_of_the_user_stays_as_it_is():
    library = "lib/python3.11/site-packages/openai/_base_client.py"
    trace = f'File "{user_code.__file__}", line 3, in f\n  File "{library}", line 9, in g\n'
    assert (
        user_code.find_location_in(trace) is None
        and user_code.add_location("it failed", trace) == "it failed"
    )
