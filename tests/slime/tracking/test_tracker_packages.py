"""Tests MLflow, SwanLab, Trackio and Prometheus: the values that they receive from a run, in their own files and
answers.

MLflow, SwanLab and Trackio are no packages of this project. If one is installed, the test uses it. If it is not
installed, a stand-in with the signatures of the recorded version takes the calls: a call that the version would not
accept fails here.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import socket
import sqlite3
import sys
import types
import urllib.request
from pathlib import Path

import pytest

from slime.config import Config
from slime.tracking import check_trackers, make_trackers
from slime.tracking.trackers.mlflow import REFUSED
from slime.tracking.trackers.record import TrackerNames

NAMES = ("train/loss", "rollout/response_len/mean", "eval/gsm8k-pass@8", "rl_kernel/grpo_loss/ms")

# "module:object" -> parameters, as in mlflow 3.17.2, swanlab 0.10.3 and trackio 0.43.0
SIGNATURES = {
    "mlflow": {
        "mlflow.tracking:MlflowClient.__init__": "self, tracking_uri, registry_uri, workspace_store_uri",
        "mlflow.tracking:MlflowClient.get_experiment_by_name": "self, name",
        "mlflow.tracking:MlflowClient.create_experiment": "self, name, artifact_location, tags",
        "mlflow.tracking:MlflowClient.create_run": "self, experiment_id, start_time, tags, run_name",
        "mlflow.tracking:MlflowClient.update_run": "self, run_id, status, name",
        "mlflow.tracking:MlflowClient.log_batch": "self, run_id, metrics, params, tags, synchronous",
        "mlflow.tracking:MlflowClient.set_terminated": "self, run_id, status, end_time",
        "mlflow.entities:Metric.__init__": "self, key, value, timestamp, step, model_id, dataset_name, "
        "dataset_digest, run_id",
        "mlflow.entities:RunTag.__init__": "self, key, value",
        "mlflow.utils.async_logging.run_operations:RunOperations.wait": "self",
    },
    "swanlab": {
        "swanlab:init": "reinit, log_dir, mode, workspace, project, public, name, color, description, job_type, "
        "group, tags, id, resume, parallel, config, settings, callbacks, kwargs",
        "swanlab:Run.log": "self, data, step",
        "swanlab:Run.finish": "self, state, error, async_log_timeout",
    },
    "trackio": {
        "trackio:init": "project, name, group, space_id, server_url, dataset_id, bucket_id, config, resume, settings, "
        "private, embed, auto_log_gpu, gpu_log_interval, auto_log_cpu, cpu_log_interval, webhook_url, "
        "webhook_min_level",
        "trackio:Run.log": "self, metrics, step",
        "trackio:Run.finish": "self",
    },
}
FLAGS = {
    "mlflow": {"use_mlflow": True, "mlflow_experiment_name": "tiny", "mlflow_run_name": "one"},
    "swanlab": {"use_swanlab": True, "swanlab_mode": "offline", "swanlab_project": "tiny"},
    "trackio": {"use_trackio": True, "trackio_project": "tiny", "trackio_run_name": "one"},
}


def config_of(**changes) -> Config:
    secrets = {"wandb_key": "secret-0123456789"}
    return Config.from_flat({"num_steps_per_rollout": 1, "prometheus_port": 0} | secrets | changes)


def log_all(trackers) -> None:
    """Logs two steps: values, then a value that is not finite."""
    for step in (0, 1):
        metrics = dict.fromkeys(NAMES, step + 0.5)
        trackers.log(metrics, step=step, step_key="rollout/step")
    trackers.log({"train/loss": math.nan}, step=2, step_key="train/step")


def real(package: str) -> None:
    """Skips the test if the package is missing; its signatures must be the recorded ones."""
    pytest.importorskip(package)
    for place, parameters in SIGNATURES[package].items():
        module, _, names = place.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        assert ", ".join(inspect.signature(found).parameters) == parameters, place


def test_mlflow_has_the_run(tmp_path):
    real("mlflow")
    from mlflow.tracking import MlflowClient

    where = f"sqlite:///{tmp_path}/flow.db"
    config = config_of(**FLAGS["mlflow"], mlflow_tracking_uri=where)
    trackers = make_trackers(config, tmp_path, resume_step=0)
    log_all(trackers)
    trackers.close("failed")
    client = MlflowClient(where)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FAILED")
    assert set(run.data.metrics) == {name.replace("@", "_") for name in NAMES}
    history = client.get_metric_history(run.info.run_id, "eval/gsm8k-pass_8")
    assert [(each.step, each.value) for each in history] == [(0, 0.5), (1, 1.5)]
    assert math.isnan(client.get_metric_history(run.info.run_id, "train/loss")[-1].value)
    assert run.data.tags["logging.wandb_key"] == "***" and run.data.tags["data.num_steps_per_rollout"] == "1"
    again = make_trackers(config.with_values(mlflow_run_id=run.info.run_id), tmp_path, resume_step=2)
    again.log({"train/loss": 7.0}, step=2, step_key="train/step")
    again.close()
    (run,) = client.search_runs([run.info.experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["train/loss"] == 7.0


def test_a_place_that_mlflow_refuses_is_named(tmp_path):
    real("mlflow")
    config = config_of(
        **FLAGS["mlflow"], mlflow_tracking_uri=f"sqlite:///{tmp_path}/flow.db", mlflow_run_id="0"
    )
    with pytest.raises(
        ValueError, match=r"--mlflow-tracking-uri must be .* that takes a run, got sqlite:.*'?0'?"
    ):
        make_trackers(config, tmp_path, resume_step=0)


def test_swanlab_has_the_run(tmp_path):
    real("swanlab")
    trackers = make_trackers(config_of(**FLAGS["swanlab"]), tmp_path, resume_step=0)
    log_all(trackers)
    trackers.close("failed")
    (record,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    written = record.read_bytes()
    assert all(name.encode() in written for name in NAMES)
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"num_steps_per_rollout" in files and b"0123456789" not in files


def test_trackio_has_the_run(tmp_path, monkeypatch):
    real("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):  # they read TRACKIO_DIR at import
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    trackers = make_trackers(config_of(**FLAGS["trackio"]), tmp_path, resume_step=0)
    log_all(trackers)
    trackers.close()
    database = sqlite3.connect(tmp_path / "trackio" / "tiny.db")
    rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logged = [(run, step, json.loads(metrics)) for run, step, metrics in rows]
    expected = [("one", step, dict.fromkeys(NAMES, step + 0.5)) for step in (0, 1)]
    assert logged == [*expected, ("one", 2, {"train/loss": "NaN"})]
    settings = "".join(str(row) for row in database.execute("select * from configs"))
    assert "num_steps_per_rollout" in settings and "0123456789" not in settings


class Anything:
    """The result of a stand-in: the object whose methods the tracker calls next."""


def stand_in(package: str, monkeypatch) -> list[tuple[str, dict]]:
    """Installs modules with the recorded signatures and returns the list of their calls. A wrong call is a
    TypeError."""
    calls: list[tuple[str, dict]] = []
    modules: dict[str, types.ModuleType] = {}
    result = Anything()
    result.info = types.SimpleNamespace(run_id="run")
    result.experiment_id = "experiment"

    def function(name: str, parameters: str):
        names = [each.strip() for each in parameters.split(",")]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(each, kind, default=None) for each in names])

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            given.pop("self", None)
            calls.append((name, dict(given)))
            return None if name.endswith("__init__") else result

        return call

    for place, parameters in SIGNATURES[package].items():
        module, _, name = place.partition(":")
        for depth in range(module.count(".") + 1):
            path = ".".join(module.split(".")[: depth + 1])
            modules.setdefault(path, types.ModuleType(path))
        owner, _, method = name.rpartition(".")
        called = function(name, parameters)
        if owner:
            if not hasattr(modules[module], owner):
                setattr(modules[module], owner, type(owner, (), {}))
            setattr(getattr(modules[module], owner), method, called)
            if method != "__init__":  # a factory returned this object
                setattr(Anything, method, lambda self, *args, _call=called, **kw: _call(self, *args, **kw))
        else:
            setattr(modules[module], name, called)
    if package == "mlflow":
        modules["mlflow.exceptions"] = types.ModuleType("mlflow.exceptions")
        modules["mlflow.exceptions"].MlflowException = type("MlflowException", (Exception,), {})
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    return calls


@pytest.mark.parametrize("package", SIGNATURES)
def test_the_calls_fit_the_recorded_version(package, tmp_path, monkeypatch):
    calls = stand_in(package, monkeypatch)
    trackers = make_trackers(config_of(**FLAGS[package]), tmp_path, resume_step=0)
    log_all(trackers)
    trackers.close("interrupted")
    assert "secret-0123456789" not in str(calls)
    called = dict(calls)
    if package == "mlflow":
        names = [given["key"] for name, given in calls if name == "Metric.__init__"]
        assert names == [name.replace("@", "_") for name in NAMES] * 2 + ["train/loss"]
        assert called["MlflowClient.set_terminated"] == {"run_id": "run", "status": "KILLED"}
        assert called["MlflowClient.__init__"]["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
        return
    first, *_ = [given for name, given in calls if name == "Run.log"]
    values = first.get("data") or first["metrics"]
    assert first["step"] == 0 and values == dict.fromkeys(NAMES, 0.5)
    assert called["init"]["project"] == "tiny"
    ended = {"swanlab": {"state": "aborted"}, "trackio": {}}
    assert called["Run.finish"] == ended[package]


def test_prometheus_serves_the_newest_values(tmp_path):
    config = config_of(use_prometheus=True, prometheus_run_name='a "run"')
    trackers = make_trackers(config, tmp_path, resume_step=0)
    log_all(trackers)
    host, port = trackers._trackers[1].address
    assert host == "127.0.0.1"
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    trackers.close()
    lines = {line for line in text.splitlines() if not line.startswith("#")}
    run = 'run_name="a \\"run\\""'
    assert lines == {
        f'slime_train_loss{{metric="train/loss",{run}}} NaN',
        f'slime_rollout_response_len_mean{{metric="rollout/response_len/mean",{run}}} 1.5',
        f'slime_eval_gsm8k_pass_8{{metric="eval/gsm8k-pass@8",{run}}} 1.5',
        f'slime_rl_kernel_grpo_loss_ms{{metric="rl_kernel/grpo_loss/ms",{run}}} 1.5',
        f'slime_rollout_step{{metric="rollout/step",{run}}} 1.0',
        f'slime_train_step{{metric="train/step",{run}}} 2.0',
    }
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10)


def test_a_taken_port_is_named_before_the_run(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = config_of(use_prometheus=True, prometheus_port=port)
        for start in (check_trackers, lambda config: make_trackers(config, tmp_path, 0)):
            with pytest.raises(ValueError, match=rf"--prometheus-port must be a free port .* got {port} "):
                start(config)
    check_trackers(config)


def test_names_that_become_equal_stay_apart():
    names = TrackerNames(REFUSED)
    given = [names.of(name) for name in ("eval/a@b", "eval/a_b", "eval/a%b", "eval/a@b", "train/loss")]
    assert given == ["eval/a_b", "eval/a_b_2", "eval/a_b_3", "eval/a_b", "train/loss"]


def test_a_run_has_the_name_of_its_directory(tmp_path):
    for name, value in (("wandb_group", "group"), ("prometheus_run_name", "mine")):
        trackers = make_trackers(config_of(use_prometheus=True, **{name: value}), tmp_path, 0)
        assert trackers._trackers[1]._run == value
        trackers.close()
    trackers = make_trackers(config_of(use_prometheus=True), Path(tmp_path, "runs", ".."), 0)
    assert trackers._trackers[1]._run == tmp_path.name
    trackers.close()


def test_what_mlflow_did_not_take_is_a_warning(tmp_path, monkeypatch, caplog):
    """The server is lost during the run. The real client would retry for minutes."""
    calls = stand_in("mlflow", monkeypatch)

    def lost(operation) -> None:
        raise sys.modules["mlflow.exceptions"].MlflowException("connection refused")

    monkeypatch.setattr(Anything, "wait", lost)
    trackers = make_trackers(config_of(**FLAGS["mlflow"]), tmp_path, resume_step=0)
    log_all(trackers)
    trackers.close()
    told = ", ".join(f"{step} (connection refused)" for step in (0, 1, 2))
    assert f"MLflow did not take step {told}; metrics.jsonl has every step" in caplog.text
    assert "MlflowClient.set_terminated" in dict(calls)
