"""The unmodified client with `vime service`: it trains, samples, saves and loads, and it survives a killed service."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import tinker
import torch
from service_process import STEP, ServiceProcess, make_datum, make_trainer, train
from tinker import types

from vime.testing.tiny_model import write_tiny_model

GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = types.ModelInput.from_ints(list(b"the sum"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    root = tmp_path_factory.mktemp("service")
    process = ServiceProcess(root, write_tiny_model(root / "tiny")).start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def alice(service: ServiceProcess) -> Iterator[tinker.ServiceClient]:
    with service.client("alice") as client:
        yield client


@pytest.fixture(scope="module")
def trainer(alice: tinker.ServiceClient) -> tinker.TrainingClient:
    return make_trainer(alice)


def test_supervised_loss_falls(trainer: tinker.TrainingClient) -> None:
    losses = train(trainer, [make_datum("hello world"), make_datum("goodbye")], 8)
    assert losses[-1] < 0.6 * losses[0]
    assert losses == sorted(losses, reverse=True)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(list(b"hello"))).result()
    assert scored[0] is None and len(scored) == 5
    passed = trainer.forward([make_datum("hello")], "cross_entropy").result()
    torch.testing.assert_close(
        torch.tensor(scored[1:]),
        torch.tensor(passed.loss_fn_outputs[0]["logprobs"].data),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_custom_loss_has_its_gradients(alice: tinker.ServiceClient) -> None:
    """A custom loss that equals cross-entropy trains the same weights as cross-entropy does."""
    data = [make_datum("custom loss")]

    def minus_sum(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {"tokens": float(sum(map(len, logprobs)))}

    plain, custom = make_trainer(alice, seed=3), make_trainer(alice, seed=3)
    expected = train(plain, data, 3)
    found = []
    for _ in range(3):
        result = custom.forward_backward_custom(data, minus_sum).result()
        custom.optim_step(STEP).result()
        found.append(result.metrics["loss:sum"])
        assert result.metrics["tokens"] == 10
    assert found == pytest.approx(expected, rel=1e-6)
    for client in (plain, custom):
        end_model(client)


def end_model(trainer: tinker.TrainingClient) -> None:
    """Ends a model, so that the next test may make one."""

    async def unload() -> None:
        with trainer.holder.aclient("train") as client:  # type: ignore[arg-type]
            await client.post("/api/v1/unload_model", body={"model_id": trainer.model_id}, cast_to=object)

    trainer.holder.run_coroutine_threadsafe(unload()).result()


def test_reinforcement_raises_the_reward(alice: tinker.ServiceClient) -> None:
    """The reward is the share of bytes below 128. Its mean over 64 samples rises."""
    trainer, means = make_trainer(alice, seed=5), []
    for _ in range(14):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, temperature=1.0)
        sampled = sampler.sample(PROMPT, 64, params).result().sequences
        rewards = [sum(token < 128 for token in each.tokens) / len(each.tokens) for each in sampled]
        means.append(sum(rewards) / len(rewards))
        data = []
        for each, reward in zip(sampled, rewards, strict=True):
            whole, head = [*PROMPT.to_ints(), *each.tokens], PROMPT.length - 1
            inputs = {
                "target_tokens": whole[1:],
                "logprobs": [0.0] * head + list(each.logprobs),
                "advantages": [0.0] * head + [reward - means[-1]] * len(each.tokens),
            }
            data.append(
                types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
            )
        done, stepped = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(STEP)
        done.result(), stepped.result()
    end_model(trainer)
    assert sum(means[-3:]) / 3 > means[0] + 0.1, means


def test_a_saved_state_continues(alice: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    data = [make_datum("save and load")]
    train(trainer, data, 2)
    path = trainer.save_state("step-2").result().path
    expected = train(trainer, data, 3)
    same = alice.create_training_client_from_state_with_optimizer(path).result()
    assert train(same, data, 3) == expected
    with pytest.raises(
        tinker.RequestFailedError, match="step-2 must be new, got an existing name; set overwrite"
    ):
        trainer.save_state("step-2").result()
    end_model(same)


def test_named_sampler_weights(alice: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_for_sampler("named").result().path
    first = alice.create_sampling_client(model_path=path).result()
    answer = first.sample(PROMPT, 1, GREEDY).result().sequences[0]
    assert len(answer.tokens) == 8 and answer.stop_reason == "length"
    base = alice.create_sampling_client(base_model="tiny").result()
    assert list(base.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens) != list(answer.tokens)
    assert first.get_base_model() == "tiny"


def test_log_probs_of_several_prompts_at_once(
    alice: tinker.ServiceClient, trainer: tinker.TrainingClient
) -> None:
    """Preference training asks for such log-probs. They equal those of one prompt at a time."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompts = [types.ModelInput.from_ints(list(b"log-probs of a prompt"[:size])) for size in range(2, 20)]
    at_once = [each.result() for each in [sampler.compute_logprobs(prompt) for prompt in prompts]]
    alone = [sampler.compute_logprobs(prompt).result() for prompt in prompts]
    for found, expected in zip(at_once, alone, strict=True):
        assert found[1:] == pytest.approx(expected[1:], abs=1e-4)


def test_errors_are_one_line(trainer: tinker.TrainingClient, alice: tinker.ServiceClient) -> None:
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [300, 1], "weights": [1, 1]},
    )
    with pytest.raises(
        tinker.RequestFailedError, match="target_tokens of datum 0 must be ids of 0 to 258, got 1 to 300"
    ):
        trainer.forward_backward([wrong], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="the base model must be tiny, got 'other'"):
        alice.create_lora_training_client("other").result()


def test_a_tenant_reaches_nothing_of_another(
    service: ServiceProcess, alice: tinker.ServiceClient, trainer: tinker.TrainingClient
) -> None:
    path = trainer.save_weights_for_sampler("mine").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampler.sample(PROMPT, 1, GREEDY).result()
    sampling, session = sampler._sampling_session_id, alice.holder.get_session_id()
    own = service.post("bob", "create_session", tags=[], user_metadata=None, sdk_version="0").json()[
        "session_id"
    ]
    asked = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    step = {"model_id": trainer.model_id, "seq_id": 90, "adam_params": {}}
    target = {"sampling_session_id": sampling}
    refused = {
        "get_info": {"model_id": trainer.model_id},
        "optim_step": step,
        "save_weights": {"model_id": trainer.model_id, "seq_id": 90},
        "unload_model": {"model_id": trainer.model_id},
        "load_weights": {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False},
        "weights_info": {"tinker_path": path},
        "create_sampling_session": {"session_id": own, "sampling_session_seq_id": 0, "model_path": path},
        "join_sampling_session": target,
        "asample": {**asked, "sampling_session_id": sampling, "seq_id": 90},
        "retrieve_future": {"request_id": f"{trainer.model_id}:1"},
        "retrieve_futures": {"target": target, "timeout": 0},
        "cancel_future": {"request_id": f"{sampling}:0"},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {},
        "create_model": {
            "session_id": session, "model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 8},
        },
    }  # fmt: skip
    answers = {path: service.post("bob", path, **body) for path, body in refused.items()}
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(refused, 404)
    assert all(set(answer.json()) == {"error"} for answer in answers.values())
    headers = {"X-API-Key": service.key("bob")}
    name = f"{service.url}/api/v1/training_runs/{trainer.model_id}"
    for method, url in (
        ("GET", name),
        ("GET", f"{name}/checkpoints"),
        ("DELETE", f"{name}/checkpoints/weights/step-2"),
    ):
        assert httpx.request(method, url, headers=headers).status_code == 404
    for listed in ("training_runs", "checkpoints", "sessions"):
        assert trainer.model_id not in httpx.get(f"{service.url}/api/v1/{listed}", headers=headers).text
    assert train(trainer, [make_datum("still mine")], 1)


def test_keys_and_audit(service: ServiceProcess) -> None:
    assert httpx.get(f"{service.url}/api/v1/sessions").status_code == 401
    wrong = httpx.get(f"{service.url}/api/v1/sessions", headers={"X-API-Key": "tml-wrong"})
    assert wrong.json() == {"error": "the key must be one of this service, got another; set TINKER_API_KEY"}
    data = service.data
    for name in ("keys.json", "audit.jsonl", "requests.sqlite3"):
        assert (data / name).stat().st_mode & 0o777 == 0o600
    assert service.key("alice") not in (data / "keys.json").read_text()
    lines = [json.loads(line) for line in (data / "audit.jsonl").read_text().splitlines()]
    step = next(line for line in lines if line["action"] == "forward_backward")
    assert step["tenant"] == "alice" and step["tokens"] == 16 and step["bytes"] > 100
    assert any(line["tenant"] is None for line in lines) and any(line.get("status") == 404 for line in lines)
    assert set().union(*lines) <= {
        "time", "tenant", "action", "session", "client", "request", "bytes", "tokens", "sampler", "path", "status",
        "address", "left_out",
    }  # fmt: skip


def test_records_of_a_tenant(service: ServiceProcess, trainer: tinker.TrainingClient) -> None:
    rest = tinker.RestClient(base_url=service.url, api_key=service.key("alice"))
    assert rest.get_server_capabilities().result().supported_models[0].model_name == "tiny"
    saved = trainer.save_state("to-delete").result().path
    run = rest.get_training_run(trainer.model_id).result()
    assert run.lora_rank == 8 and run.last_checkpoint is not None and run.last_checkpoint.tinker_path == saved
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.lora_rank, info.train_mlp, info.train_unembed) == (8, True, False)
    rest.set_checkpoint_ttl_from_tinker_path(saved, 7200).result()
    listed = {each.tinker_path: each for each in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    assert listed[saved].expires_at is not None and (listed[saved].size_bytes or 0) > 1000
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert saved not in {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}
    folders = {path.name for path in (service.data / "checkpoints").glob("*/weights-*")}
    assert len(folders) == sum(path.split("/")[-2] == "weights" for path in listed) - 1


@pytest.mark.slow
def test_a_killed_service_continues(service: ServiceProcess, alice: tinker.ServiceClient) -> None:
    """The client notices nothing, and the numbers equal those without a kill, to the bit."""
    data, audit = [make_datum("kill and continue")], service.data / "audit.jsonl"
    expected = train(undisturbed := make_trainer(alice, seed=7), data, 8)
    end_model(undisturbed)
    trainer = make_trainer(alice, seed=7)
    found = train(trainer, data, 3)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = audit.read_text()
    params = types.SamplingParams(max_tokens=200, temperature=1.0)
    samples = [sampler.sample(types.ModelInput.from_ints([65, number]), 1, params) for number in range(4)]
    accepted = [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(STEP)]
    while audit.read_text().removeprefix(before).count("\n") < 6:
        time.sleep(0.005)
    service.kill()
    again = threading.Thread(target=service.start)
    again.start()
    found.append(accepted[0].result().metrics["loss:sum"])
    accepted[1].result()
    assert [len(each.result().sequences) for each in samples] == [1] * 4
    again.join()
    assert found + train(trainer, data, 4) == expected
    after = audit.read_text().removeprefix(before)
    counts = {kind: after.count(f'"{kind}"') for kind in ("sample", "forward_backward", "optim_step")}
    assert counts == {"sample": 4, "forward_backward": 5, "optim_step": 5}, "a request was accepted twice"
    assert "of model" in service.log.read_text(), "the new process computed no request again"
