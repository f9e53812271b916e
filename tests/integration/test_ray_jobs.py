"""Ray's Jobs API for real: a head with token authentication; jobs that succeed, fail, stop; clients that get lost.

Most runs are the stand-in, one is the real training. The head is started by our own node runner, so its clean-up is under test as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.doctor.verb import doctor
from grpo_dist.errors import UserError
from grpo_dist.launch.folder import AttemptFolder
from grpo_dist.launch.tokens import clean_env
from grpo_dist.submit import records, verbs
from grpo_dist.submit.backend import Unreachable
from grpo_dist.submit.ray_api import RayApi
from tests.integration.runs import metrics, recipe_for, write_recipe

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

ROOT = Path(__file__).parents[2]
STAND_IN = "tests.integration.stand_in_train"
PLANTED = "planted-wandb-key-9876543210"


@dataclass
class Head:
    """A head as an administrator would start it; its environment has the users' secrets and the code."""

    folder: Path
    dashboard: str
    address: str
    token: Path
    process: subprocess.Popen[bytes]


def start_head(folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "grpo_dist.launch.node", "--folder", str(folder), "--name", "head", "--role", "head",
        "--head", "--cpus", "8", "--", "sleep", "infinity",
    ]  # fmt: skip
    env = clean_env(os.environ) | {
        "PYTHONPATH": str(ROOT), "WANDB_API_KEY": PLANTED, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    folder.mkdir(parents=True)
    with (folder / "runner.log").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("ray") / "attempt-0"
    process = start_head(folder)
    try:
        deadline = time.monotonic() + 120
        while not (facts := AttemptFolder(folder).cluster()):
            assert process.poll() is None, (folder / "runner.log").read_text()
            assert time.monotonic() < deadline, (folder / "runner.log").read_text()
            time.sleep(0.3)
        token = Path(facts["token"])
        _until_jobs(RayApi(facts["dashboard"], token.read_text()))
        yield Head(folder, facts["dashboard"], facts["address"], token, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    # The end of the runner is the end of everything it started, with its session folder.
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _until_jobs(api: RayApi) -> None:
    """The dashboard takes jobs a little after the head answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            api.jobs()
            return
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(0.5)


class Runs:
    def __init__(self, head: Head, folder: Path) -> None:
        self.head, self.folder = head, folder

    def cluster(self, **changes: Any) -> Path:
        section = {"address": self.head.dashboard, "token": str(self.head.token), **changes}
        body = {
            "backend": "ray", "python": sys.executable, "storage": {"runs": str(self.folder / "runs")},
            "ray": section, "secrets": ["WANDB_API_KEY"], "preemption": {"grace": 30},
        }  # fmt: skip
        path = self.folder / f"cluster-{len(list(self.folder.glob('cluster-*')))}.yaml"
        path.write_text(json.dumps(body))  # JSON is YAML
        return path

    def submit(self, name: str, *overrides: str, cluster: Path | None = None) -> records.Record:
        words = [f"run.name={name}", *overrides]
        assert verbs.submit("quickstart", cluster or self.cluster(), words, say=lambda _: None, module=STAND_IN) == 0
        return records.find(name)

    def follow(self, name: str) -> tuple[int, list[str]]:
        lines: list[str] = []
        return verbs.logs(name, follow=True, say=lines.append), lines

    def wait_for_step(self, name: str, step: int) -> None:
        path, deadline = self.folder / "runs" / name / "metrics.jsonl", time.monotonic() + 90
        while not path.exists() or len(path.read_text().splitlines()) < step:
            assert time.monotonic() < deadline, verbs.logs(name)
            time.sleep(0.2)


@pytest.fixture
def runs(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("GRPO_DIST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.ray/auth_token of the person who runs the tests
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # Ray's own client would go there
    return Runs(head, tmp_path)


def test_the_doctor_looks_at_the_cluster_through_a_job(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    said: list[str] = []
    status = doctor(cluster=runs.cluster(), as_json=True, say=said.append)
    (line,) = said
    assert PLANTED not in line
    rows = json.loads(line)["rows"]
    assert status == 0, rows
    node = runs.head.address.rpartition(":")[0]
    there = {row["subject"]: row["text"] for row in rows if row["node"] == node}
    assert there["node"].startswith("CPU 8, GPU 0")
    assert there["versions"].endswith("as pinned")
    assert [row["level"] for row in rows if row["subject"] == "Ray"] == ["ok", "ok"]  # from here, and inside
    wrong = runs.folder / "wrong-token"
    wrong.write_text("w" * 64)
    wrong.chmod(0o600)
    assert doctor(cluster=runs.cluster(token=str(wrong)), say=said.append) == 1
    assert any(line.startswith("fail") and "token" in line for line in said)


def test_submit_status_logs_and_success(runs: Runs) -> None:
    record = runs.submit("ok", "run.steps=4")
    code, lines = runs.follow("ok")
    assert code == 0, lines
    assert [line for line in lines if line.startswith("stand-in: step")] == [
        f"stand-in: step {n}" for n in (1, 2, 3, 4)
    ]
    said: list[str] = []
    assert verbs.status("ok", say=said.append) == 0
    assert said[0] == "ok: succeeded, exit code 0"
    assert any("step 4" in line for line in said)
    assert verbs.jobs(cluster=record.cluster_file, say=said.append) == 0
    assert said[-1].split()[:4] == ["ok", "ray", record.job, "succeeded"]
    lines.clear()
    verbs.logs("ok", role="verifier", say=lines.append)
    assert any("stand-in worker says hello" in line for line in lines)


def test_the_real_training_is_the_entry_point_of_a_job(runs: Runs, tiny_model: Path) -> None:
    """Not the stand-in: engines, verifiers and learner join the cluster that the job runs in."""
    file = write_recipe(
        runs.folder / "recipe.yaml", recipe_for(runs.folder, tiny_model, run={"name": "real", "steps": 2})
    )
    assert verbs.submit(file, runs.cluster(), ["run.name=real"], say=lambda _: None) == 0
    code, lines = runs.follow("real")
    assert code == 0, lines
    rows = metrics(runs.folder / "runs" / "real")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4


def test_no_secret_in_job_or_files(runs: Runs) -> None:
    """f12: the value is in the nodes' environment only; no log, job info, recipe, run or launch file has it."""
    record = runs.submit("quiet", "run.steps=2")
    assert runs.follow("quiet")[0] == 0
    token = runs.head.token.read_text()
    api = RayApi(runs.head.dashboard, token)
    assert PLANTED not in json.dumps(api.jobs())
    assert token not in json.dumps(api.jobs())
    assert PLANTED not in api.log(record.job)
    for folder in (runs.folder, runs.head.folder.parent):
        for path in folder.rglob("*"):
            if path.is_file() and path != runs.head.token:
                data = path.read_bytes()
                assert PLANTED.encode() not in data, path
                assert token.encode() not in data, path


def test_a_job_that_fails_at_step_2_ends_with_1_and_the_cause_last(runs: Runs) -> None:
    """f8"""
    runs.submit("fail-2", "run.steps=4")
    code, lines = runs.follow("fail-2")
    assert code == 1
    assert any("step 2 fails on purpose" in line for line in lines[-4:])
    assert lines[-1].startswith("run fail-2 failed: ")
    said: list[str] = []
    verbs.status("fail-2", as_json=True, say=said.append)
    assert json.loads(said[0])["phase"] == "failed"
    assert json.loads(said[0])["exit_code"] == 1


def test_stop_gives_time_to_save_and_two_jobs_run_at_once(runs: Runs) -> None:
    runs.submit("one", "run.steps=100000")
    runs.submit("two", "run.steps=100000")
    runs.wait_for_step("one", 2)
    runs.wait_for_step("two", 2)
    with pytest.raises(UserError, match="run one is already running"):
        runs.submit("one", "run.steps=5")
    said: list[str] = []
    assert verbs.stop("one", wait=60, say=said.append) == 0
    code, lines = runs.follow("one")
    assert code == 130
    assert any("saved step" in line and "130" in line for line in lines)
    assert verbs.backend_of("ray").state(records.find("two")).phase == "running"
    assert verbs.stop("two", now=True, wait=60, say=said.append) == 0
    assert said[-1] == "killed"
    assert runs.follow("two")[0] not in (0, 130)


def test_the_same_submission_again_resumes(runs: Runs) -> None:
    """k5: what a scheduler's retry does, the same command line a second time."""
    record = runs.submit("again", "run.steps=3")
    assert runs.follow("again")[0] == 0
    api = RayApi(runs.head.dashboard, runs.head.token.read_text())
    facts = api.job(record.job)
    assert facts is not None
    body = {key: facts[key] for key in ("entrypoint", "runtime_env", "metadata")}
    second = api.submit(body)
    for _ in api.tail(second, lambda: (api.job(second) or {}).get("status") not in ("PENDING", "RUNNING")):
        pass
    assert "starts at step 3 with W&B id id-1" in api.log(second)


def test_a_client_killed_while_following_changes_nothing(runs: Runs) -> None:
    runs.submit("followed", "run.steps=60")
    runs.wait_for_step("followed", 2)
    code = "import sys; from grpo_dist.submit import verbs; sys.exit(verbs.logs('followed', follow=True))"
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    while "step 3" not in client.stdout.readline():
        assert client.poll() is None
    client.kill()
    client.wait(20)
    assert verbs.backend_of("ray").state(records.find("followed")).phase == "running"
    code_after, lines = runs.follow("followed")
    assert code_after == 0
    steps = [line for line in lines if line.startswith("stand-in: step")]
    assert steps == [f"stand-in: step {n}" for n in range(1, 61)]  # from the beginning, no gap, nothing twice


def test_wrong_token_wrong_address_and_nobody_there(runs: Runs) -> None:
    wrong = runs.folder / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    with pytest.raises(UserError, match="refuses: the token is not the cluster's"):
        runs.submit("x", cluster=runs.cluster(token=str(wrong)))
    wrong.chmod(0o644)
    with pytest.raises(UserError, match="others can read it: chmod 600"):
        runs.submit("x", cluster=runs.cluster(token=str(wrong)))
    with pytest.raises(UserError, match="no token was sent"):
        runs.submit("x", cluster=runs.cluster(authentication="none"))
    with pytest.raises(UserError, match="no token for this Ray cluster"):
        runs.submit("x", cluster=runs.cluster(token=None))
    with pytest.raises(Unreachable, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9") as caught:
        runs.submit("x", cluster=runs.cluster(address="http://127.0.0.1:9"))
    assert caught.value.exit_code == 3
    with pytest.raises(Unreachable):  # the GCS port speaks another language
        runs.submit("x", cluster=runs.cluster(address=f"http://{runs.head.address}"))


def test_refused_before_anything_is_sent(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.submit.ray_jobs.ray_version", lambda: "2.59.0")
    with pytest.raises(UserError, match=r"the cluster runs Ray 2\.60\.\d+, this machine 2\.59\.0"):
        runs.submit("x")
    monkeypatch.undo()


def test_too_much_to_send_names_the_biggest_files(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """f2, with a limit of 1 MB instead of 100 MB: .git and checkpoints do not count, the data does."""
    here = runs.folder / "work"
    for name, size in ((".git/pack", 4), ("checkpoints/a.bin", 4), ("data/big.bin", 3), ("data/small.bin", 0.01)):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(os.urandom(int(size * 1e6)))
    cluster = runs.cluster(working_dir=str(here), upload_limit="1M")
    with pytest.raises(UserError) as caught:
        runs.submit("x", cluster=cluster)
    text = str(caught.value)
    assert "data/big.bin" in text.splitlines()[1]
    assert ".git" not in text
    assert "checkpoints" not in text
    (here / "rows.jsonl").write_text("{}\n")
    runs.submit("sent", "run.steps=1", cluster=runs.cluster(working_dir=str(here), excludes=["data/big.bin"]))
    assert runs.follow("sent")[0] == 0
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match="is a file here, but not on the cluster"):
        runs.submit("y", "data.source=rows.jsonl", cluster=runs.cluster())


def test_a_secret_that_the_nodes_do_not_have(runs: Runs) -> None:
    cluster = runs.cluster()
    cluster.write_text(cluster.read_text().replace("WANDB_API_KEY", "GRPO_NOT_THERE"))
    runs.submit("nosecret", "run.steps=1", cluster=cluster)
    code, lines = runs.follow("nosecret")
    assert code == 2
    assert any("secret GRPO_NOT_THERE is not in the environment" in line for line in lines)
