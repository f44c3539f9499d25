"""Tests that a run masks secrets in the files that it writes."""

import json
import time

import pytest

from slime.config.secrets import is_secret, mask_command, mask_secrets
from slime.rules.flags import own_flags
from slime.tracking.environment import write_environment
from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.run_record import record_error, record_warnings

SECRET = """WANDB_API_KEY VIME_RUN_KEY --wandb-key --vllm-api-key HF_TOKEN DB_PASSWORD AWS_SECRET_ACCESS_KEY
    NCCL_X_PASS HF_AUTH HF_TOKENS VLLM_KEYS GITHUB_PAT DB_PWD X-Authorization Cookie session_cookies apiKey hfToken
    OPENAI_API_KEY_2 HF_TOKEN2 dbpassword PASSWORD_FILE X-Amz-Signature key token pass pwd auth authorization pat cookie
    keys tokens auths oauth auth_header authorizationHeaders SLACK_WEBHOOK"""
OPEN = """--input-key --label-key --reward-key --multimodal-keys --max-tokens-per-gpu --rollout-stop-token-ids eos_token
    --session-max-tokens --max-num-batched-tokens VLLM_CPU_KVCACHE_SPACE CUDA_VISIBLE_DEVICES PWD pass_at_k monkey
    author passport compass tokenizer public_key"""


def test_secrets_are_told_by_name():
    assert [name for name in SECRET.split() if not is_secret(name)] == []
    assert [name for name in OPEN.split() if is_secret(name)] == []


def test_each_flag_is_masked_exactly_if_it_is_declared_a_secret():
    assert [name for name, spec in own_flags().items() if is_secret(name) != bool(spec.secret)] == []


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://h/x?token=12345&n=3", "http://h/x?token=***&n=3"),
        ("https://h/?a=1&api_key=s3c#part", "https://h/?a=1&api_key=***#part"),
        ("s3://b/k?X-Amz-Signature=abc&se=1", "s3://b/k?X-Amz-Signature=***&se=1"),
        ("http://me:p@ss@proxy:80/x", "http://***@proxy:80/x"),
        ("the header is Bearer abc.def, sent", "the header is Bearer ***, sent"),
        ("curl -H 'Authorization: Basic YWJj' http://x", "curl -H 'Authorization: ***' http://x"),
        ("Cookie: a=b; c=d\nx: 1", "Cookie: ***\nx: 1"),
        ("X-Api-Key: abc", "X-Api-Key: ***"),
        ("a=1,token=abc", "a=1,token=***"),
        ("export HF_TOKEN='a b'; n=1", "export HF_TOKEN='***'; n=1"),
        ("got {'api_key': 'a', 'n': 1}", "got {'api_key': '***', 'n': 1}"),
        ('--headers={"Authorization":"tok"}', '--headers={"Authorization":"***"}'),
        ('[{"HF_AUTH": "x", "n": {"pwd": "y"}}]', '[{"HF_AUTH": "***", "n": {"pwd": "***"}}]'),
        ("hf_" + "a" * 34 + " is a token", "*** is a token"),
        ("token = abc", "token = ***"),
        (
            "failed: vime train --wandb-key a1b2 --input-key question1",
            "failed: vime train --wandb-key *** --input-key question1",
        ),
        ("run --api-key 'a1 b2'", "run --api-key '***'"),
        ("http://h/?h=Bearer%20abc", "http://h/?h=Bearer%20***"),
        ("--wandb-key must be set", "--wandb-key must be set"),
        ("if key == value and not token", "if key == value and not token"),
        ("the answer key: question, max_tokens=4096", "the answer key: question, max_tokens=4096"),
        ("https://host/a:b?n=1&page=2", "https://host/a:b?n=1&page=2"),
    ],
)
def test_secrets_inside_texts_are_masked(text, masked):
    assert mask_secrets(text) == masked
    assert mask_secrets({"x": [text, 1]}) == {"x": [masked, 1]}
    assert mask_secrets(masked) == masked


def test_entries_are_masked_in_every_form():
    assert mask_secrets({"wandb_key": "k", "wandb_team": None, "n": [1, {"hf_token": "t"}]}) == {
        "wandb_key": "***",
        "wandb_team": None,
        "n": [1, {"hf_token": "***"}],
    }
    pairs = {
        "headers": [["Authorization", "tok"], ["Accept", "all"]],
        "env": {"name": "HF_PAT", "value": "z"},
    }
    assert mask_secrets(pairs) == {
        "headers": [["Authorization", "***"], ["Accept", "all"]],
        "env": {"name": "HF_PAT", "value": "***"},
    }
    counts = {"max_tokens": 3, "stop_tokens": ["a"], "tokens": [1, 2], "use_auth": True, "cookie": ""}
    assert mask_secrets(counts) == counts
    argv = [
        *("--wandb-key", "abc", "--input-key", "question", "--vllm-api-key=abc", "HF_TOKEN=abc"),
        *("--train-env-vars", '{"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"}'),
        *("--train-env-vars={'NCCL_X_PASS': 'abc'}", "--rm-url=http://h?key=abc"),
        *("--http-proxy", "http://me:abc@proxy:80", "--use-wandb"),
    ]
    assert mask_command(argv) == [
        *("--wandb-key", "***", "--input-key", "question", "--vllm-api-key=***", "HF_TOKEN=***"),
        *("--train-env-vars", '{"WANDB_API_KEY": "***", "NCCL_DEBUG": "INFO"}'),
        *("--train-env-vars={'NCCL_X_PASS': '***'}", "--rm-url=http://h?key=***"),
        *("--http-proxy", "http://***@proxy:80", "--use-wandb"),
    ]
    assert mask_secrets(argv) == mask_command(argv)


def test_no_file_of_a_run_has_a_secret(tmp_path):
    environ = {"NCCL_X_PASS": "hidden-1", "HF_AUTH": "hidden-2", "RAY_ADDRESS": "http://h?token=hidden-3"}
    argv = ["vime", "train", "--rm-url", "http://h/?api_key=hidden-4", "-H", "Authorization: Bearer hidden-5"]
    write_environment(tmp_path, argv, environ)
    events = Events("driver", str(tmp_path))
    handler = record_warnings(events)
    import logging

    try:
        logging.getLogger("hook").warning("POST http://h?token=hidden-6 with %s", {"Cookie": "hidden-7"})
    finally:
        logging.getLogger().removeHandler(handler)
    record_error(events, tmp_path, ValueError("reward server refused Bearer hidden-8"))
    events.close()
    assert len(list(read_events(tmp_path, ("warning", "error")))) == 2
    for path in tmp_path.iterdir():
        assert "hidden" not in path.read_text(), path
    assert (
        json.loads((tmp_path / "environment.json").read_text())["variables"]["RAY_ADDRESS"]
        == "http://h?token=***"
    )


@pytest.mark.parametrize(
    "part", ["token: ", "token=", "a: ", '"a": "', "://", "Bearer ", "[", "eyJaaaaaaaaa.", "a-"]
)
def test_masking_takes_linear_time(part):
    """The text of a model, or of a server that answers with an error, may be long."""
    began = time.process_time()
    mask_secrets(part * 40_000)
    assert time.process_time() - began < 2
