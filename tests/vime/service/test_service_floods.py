"""The unmodified client beyond its limits, with a key of another tenant, and killed in the middle of a step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from service_process import STEP, make_datum, make_trainer, train
from service_thread import ServiceThread
from tinker import types

from vime.service.limits import TenantLimits
from vime.service.requests import NO_HEAD
from vime.testing.tiny_model import write_tiny_model

PER_MINUTE = 600
"""Ten tokens per second."""
HALF_A_STEP = """
import os, signal, sys
import tinker
from service_process import make_datum, make_trainer
trainer = make_trainer(tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2]))
trainer.forward_backward([make_datum("half of a step")], "cross_entropy").result()
print(trainer.model_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceThread]:
    limits = TenantLimits(models_per_tenant=1, tokens_per_minute=PER_MINUTE, rank=8, tokens_per_sequence=256)
    base = write_tiny_model(tmp_path / "tiny")
    served = ServiceThread(base, tmp_path / "data", limits, idle_seconds=2.0)
    yield served
    served.stop()


def test_a_tenant_that_floods_waits_alone(service: ServiceThread) -> None:
    """The client waits as long as the answer says, and sends the request again. Another tenant does not wait."""
    with service.client("alice") as flooding, service.client("bob") as other:
        alice, bob = make_trainer(flooding), make_trainer(other)
        used = [make_datum("x" * 196)] * 3
        alice.forward(used, "cross_entropy").result()  # 585 of 600 tokens
        start = time.monotonic()
        waits = alice.forward([make_datum("y" * 51)], "cross_entropy")
        assert bob.forward([make_datum("not slowed")], "cross_entropy").result().metrics["loss:sum"] > 0
        assert not waits.future().done()
        assert len(waits.result().loss_fn_outputs[0]["logprobs"].data) == 50
        assert 1.0 < time.monotonic() - start < 30
        assert {line["status"] for line in service.read_audit("alice", "refused")} == {429}
        assert len(service.read_audit("alice", "forward")) == 2, "a refused request was accepted twice"
        assert not service.read_audit("bob", "refused")


def test_samples_beyond_the_limit_wait(service: ServiceThread) -> None:
    """This service has no engine, so the accepted request fails. Until then, the client sends it again."""
    with service.client("alice") as client:
        trainer = make_trainer(client)
        trainer.forward([make_datum("x" * 196)] * 3, "cross_entropy").result()
        sampler = client.create_sampling_client(base_model="tiny").result()
        prompt = types.ModelInput.from_ints([65] * 50)
        waits = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1))
        with pytest.raises(tinker.RequestFailedError, match="start\\(\\) comes first"):
            waits.result()
        assert {line["status"] for line in service.read_audit("alice", "refused")} == {429}
        assert [line["tokens"] for line in service.read_audit("alice", "sample")] == [50]


def test_the_message_of_a_refusal(service: ServiceThread) -> None:
    """This is the error with which the client gives up. A request that can never be accepted is no reason to wait."""
    with service.client("alice") as client:
        trainer = make_trainer(client)
        trainer.forward([make_datum("x" * 196)] * 3, "cross_entropy").result()
        sampler = client.create_sampling_client(base_model="tiny").result()

        async def send(count: int) -> None:
            body = {
                **{"sampling_session_id": sampler._sampling_session_id, "seq_id": 0},
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [65] * count}]},
                "sampling_params": {"max_tokens": 1},
            }
            with client.holder.aclient("sample") as low:  # type: ignore[arg-type]
                await low.with_options(max_retries=0).post("/api/v1/asample", body=body, cast_to=object)

        rule = "tokens per minute must be at most 600, got 200 more; retry in 1[0-9] s"
        with pytest.raises(tinker.RateLimitError, match=rule):
            client.holder.run_coroutine_threadsafe(send(200)).result()
        too_many = [make_datum("x" * 202)] * 3
        with pytest.raises(tinker.RequestFailedError, match="at most 600 tokens, got 603; send fewer"):
            trainer.forward(too_many, "cross_entropy").result()


def test_the_head_has_no_adapter(service: ServiceThread, caplog: pytest.LogCaptureFixture) -> None:
    """The client asks for an adapter of the head by default. It logs that the service has none."""
    with service.client("alice") as client:
        path = client.create_lora_training_client("tiny", rank=8).result().save_state("one").result().path
        rest = tinker.RestClient(base_url=service.url, api_key=service.keys["alice"])
        assert rest.get_weights_info_by_tinker_path(path).result().train_unembed is False
        (line,) = service.read_audit("alice", "no_head_adapter")
        assert line["request"] == f"{path.split('/')[2]}:0"
    assert (
        sum(
            NO_HEAD in record.getMessage()
            for record in caplog.records
            if record.name == "tinker._base_client"
        )
        == 1
    )
    caplog.clear()
    with service.client("bob") as client:
        make_trainer(client)
        with pytest.raises(tinker.BadRequestError, match="the optimizer must be adamw, got dimuon"):
            client.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result()
    assert NO_HEAD not in caplog.text


def test_a_loss_that_is_not_served(service: ServiceThread) -> None:
    """A client of stable_reinforce gets the names of the served losses before it samples. gspo is one of these."""
    served = "cross_entropy, importance_sampling, ppo, cispo, dro, gspo"
    inputs = {"target_tokens": [66, 67], "logprobs": [-5.5, -5.5], "advantages": [1.0, 1.0]}
    inputs["sequence_ratio_mask"] = [0.0, 1.0]
    datum = types.Datum(model_input=types.ModelInput.from_ints([65, 66]), loss_fn_inputs=inputs)
    with service.client("alice") as client:
        trainer = make_trainer(client)
        done = trainer.forward_backward(
            [datum], "gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
        )
        assert trainer.optim_step(STEP).result().metrics["grad_norm"] > 0
        assert done.result().metrics["loss:sum"] < 0
        with pytest.raises(tinker.RequestFailedError, match=f"must be one of {served}, got stable_reinforce"):
            trainer.forward_backward([datum], "stable_reinforce").result()
        recorded = client.create_sampling_client(base_model="tiny", record_stability_info=True).result()
        with pytest.raises(
            tinker.BadRequestError, match=f"record_stability_info must be .* choose one of {served}"
        ):
            recorded.sample(types.ModelInput.from_ints([65]), 1, types.SamplingParams(max_tokens=1)).result()


def test_a_key_of_another_tenant(service: ServiceThread) -> None:
    """The client shows the same line for a checkpoint of another tenant and for one that does not exist."""
    with service.client("alice") as mine, service.client("bob") as other:
        path = make_trainer(mine).save_state("mine").result().path
        missing = path.replace("mine", "missing")
        for asked in (path, missing):
            with pytest.raises(
                tinker.NotFoundError, match=f"the checkpoint must be one of yours, got '{asked}'"
            ):
                other.create_training_client_from_state(asked).result()
    with pytest.raises(tinker.AuthenticationError, match="the key must be one of this service, got another"):
        tinker.ServiceClient(base_url=service.url, api_key="tml-wrong").create_lora_training_client(
            "tiny"
        ).result()


def test_a_client_that_dies_in_the_middle_of_a_step(service: ServiceThread) -> None:
    """Its half step changes nothing for others, its memory becomes free, and its tenant gets a new model."""
    command = [sys.executable, "-c", HALF_A_STEP, service.url, service.keys["alice"]]
    died = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert died.returncode == -9, died.stderr
    (adapter,) = service.trainer.tenants
    assert service.trainer.tenants[adapter].gradients is not None
    data = [make_datum("after the death")]
    with service.client("bob") as other:
        losses = train(make_trainer(other, seed=4), data, 2)
    end = time.monotonic() + 60
    while adapter in service.trainer.tenants:
        assert time.monotonic() < end, "the memory of a dead client did not become free"
        time.sleep(0.1)
    with service.client("alice") as again:
        assert train(make_trainer(again, seed=4), data, 2) == losses
    assert service.read_model(adapter) == (died.stdout.strip(), "ended")
