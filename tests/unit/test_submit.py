"""Submission without a cluster: records, states, exit codes, uploads, kubectl through a stand-in, status lines."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import UserError
from grpo_dist.launch import driver
from grpo_dist.launch.peek import last_objects, peek
from grpo_dist.submit import records, verbs
from grpo_dist.submit.backend import Unreachable, patiently
from grpo_dist.submit.kubernetes import KubernetesBackend, state_of
from grpo_dist.submit.ray_api import whole_lines
from grpo_dist.submit.ray_jobs import state_of as job_state
from grpo_dist.submit.records import JobState, Record
from grpo_dist.submit.show import status_lines
from grpo_dist.submit.tokens import find_token
from grpo_dist.submit.upload import pack

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_DIST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record(**changes: Any) -> Record:
    facts = {
        "run": "r1", "submission": "r1-abc", "backend": "local", "job": "1", "run_dir": "/runs/r1",
        "launch": "/runs/.launch/r1", "cluster_file": "c.yaml",
    }  # fmt: skip
    return Record(**{**facts, **changes})


# ---- records and codes


def test_a_run_is_found_by_name_submission_or_folder() -> None:
    records.save(record())
    records.save(record(run="other", submission="other-1", run_dir="/runs/other", created=1.0))
    for name in ("r1", "r1-abc", "/runs/r1"):
        assert records.find(name).run == "r1"
    assert [one.run for one in records.records()] == ["r1", "other"]
    with pytest.raises(UserError, match=r"no run 'othre' was submitted from here .*did you mean other"):
        records.find("othre")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState("succeeded", 0), 0),
        (JobState("failed", 1), 1),
        (JobState("failed", None), 1),
        (JobState("failed", 85), 85),
        (JobState("stopped", 130), 130),
        (JobState("stopped", None), 130),
        (JobState("requeued", None), 85),
        (JobState("unknown", None), 3),
        (JobState("running", None), 1),
        (JobState("pending", None), 1),
    ],
)
def test_exit_status_of_a_state(state: JobState, code: int) -> None:
    assert verbs.code_of(state) == code


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, ("succeeded", 0)),
        ({"status": "FAILED", "driver_exit_code": 7, "message": "x"}, ("failed", 7)),
        (
            {"status": "FAILED", "message": "Job entrypoint command failed with exit code 85, last available"},
            ("failed", 85),
        ),
        ({"status": "FAILED", "driver_exit_code": 130}, ("stopped", 130)),
        ({"status": "FAILED", "driver_exit_code": None, "message": "node died"}, ("failed", 1)),
        ({"status": "FAILED", "driver_exit_code": 0, "message": "odd"}, ("failed", 1)),
        ({"status": "STOPPED"}, ("stopped", 130)),
        ({"status": "RUNNING"}, ("running", None)),
        ({}, ("unknown", None)),
    ],
)
def test_a_failed_ray_job_never_looks_like_success(facts: dict[str, Any], wanted: tuple[str, int | None]) -> None:
    state = job_state(facts)
    assert (state.phase, state.exit_code) == wanted


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        ({}, ("pending", None)),
        ({"jobDeploymentStatus": "Initializing", "rayClusterStatus": {"state": "ready"}}, ("pending", None)),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, ("running", None)),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, ("succeeded", 0)),
        ({"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED", "failed": 2}, ("requeued", None)),
        (
            {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "failed with exit code 2, last"},
            ("failed", 2),
        ),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, ("failed", 1)),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "with exit code 130"}, ("stopped", 130)),
    ],
)
def test_states_of_a_rayjob(status: dict[str, Any], wanted: tuple[str, int | None]) -> None:
    state = state_of({"status": status})
    assert (state.phase, state.exit_code) == wanted


def test_following_outlives_a_scheduler_that_does_not_answer_for_a_while() -> None:
    answers = [Unreachable("away"), Unreachable("still away"), "here"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    assert patiently(ask, pause=0) == "here"
    answers[:] = [Unreachable("gone")] * 3
    with pytest.raises(Unreachable, match="gone"):
        patiently(ask, seconds=0, pause=0)


def test_one_cluster_that_is_away_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    records.save(record(where={"started": "1", "host": os.uname().nodename}))
    section = {"address": "http://127.0.0.1:9", "authentication": "none"}
    records.save(record(run="far", submission="far-1", backend="ray", where={"ray": section, "python": "python"}))
    said: list[str] = []
    assert verbs.jobs(as_json=True, say=said.append) == 0
    rows = {row["run"]: row for row in json.loads(said[0])}
    assert rows["far"]["phase"] == "unknown"
    assert "no Ray dashboard answers" in rows["far"]["detail"]
    assert rows["r1"]["phase"] == "failed"


def test_render_only_back_ends_say_what_to_do() -> None:
    for name, tool in (("skypilot.yaml", "sky launch"), ("ray-up-aws.yaml", "ray up")):
        with pytest.raises(UserError, match=tool):
            verbs.submit("quickstart", ROOT / "cluster_configs" / "cloud" / name, ["weights.backend=gloo"])


# ---- upload and token


def test_the_same_files_give_the_same_bytes_and_secrets_stay(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.jsonl", ".git/config", ".env", "ray_token", "wandb/x", "id_rsa", "big.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = pack("recipe: 1", tmp_path, ["*.parquet"], 1 << 20)
    os.utime(tmp_path / "a.py", (1, 1))
    assert pack("recipe: 1", tmp_path, ["*.parquet"], 1 << 20) == first
    with zipfile.ZipFile(BytesIO(first)) as archive:
        assert archive.namelist() == ["grpo-recipe.yaml", "a.py", "sub/b.jsonl"]
    assert zipfile.ZipFile(BytesIO(pack("x", None, [], 1 << 20))).namelist() == ["grpo-recipe.yaml"]


def test_a_600_mb_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(600 * 10**6)
    with pytest.raises(UserError) as caught:
        pack("x", tmp_path, [], 100 << 20)
    assert str(caught.value).splitlines()[1].split() == ["600.0", "MB", "weights.bin"]


def test_where_a_token_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no token for this Ray cluster: set ray\.token"):
        find_token(None, {})
    (tmp_path / ".ray").mkdir()
    own = tmp_path / ".ray" / "auth_token"
    own.write_text("own\n")
    own.chmod(0o600)
    assert find_token(None, {}) == "own"
    other = tmp_path / "other"
    other.write_text("other")
    other.chmod(0o600)
    assert find_token(None, {"RAY_AUTH_TOKEN_PATH": str(other)}) == "other"
    assert find_token(str(other), {"RAY_AUTH_TOKEN": "value"}) == "other"


def test_pieces_become_lines() -> None:
    assert list(whole_lines(iter(["a\nb", "c\n", "\nd"]))) == ["a", "bc", "", "d"]


# ---- files


def test_peek_reads_a_run_that_is_being_written(tmp_path: Path) -> None:
    run, launch = tmp_path / "r", tmp_path / "l"
    assert peek(launch, run)["progress"]["step"] == 0
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "time": 5, "rollout/reward_mean": 0.5, "fleet/rollout_live": 1}\n{"st'
    )
    (run / "events.jsonl").write_text('{"kind": "engine_started", "worker": "rollout-0", "pid": 7, "node": "h"}\n')
    found = peek(launch, run)["progress"]
    assert (found["step"], found["metrics"], found["fleet"]) == (2, {"rollout/reward_mean": 0.5}, {"rollout_live": 1})
    assert found["workers"] == {"rollout-0": {"pid": 7, "node": "h"}}
    assert last_objects(tmp_path / "none", 3) == []


def test_status_lines() -> None:
    files = {
        "now": 100.0, "nodes": [{"name": "n2", "host": "h2", "state": "waiting for the head", "detail": ""}],
        "progress": {
            "step": 3, "updated": 90.0, "metrics": {"rollout/reward_mean": 0.25},
            "fleet": {"rollout_live": 1.0, "rollout_wanted": 2.0}, "evaluation": None, "events": [],
            "workers": {"rollout-0": {"node": "10.0.0.2", "pid": 1}}, "now": {"waiting_for": "the learner", "since": 95},
        },
    }  # fmt: skip
    lines = list(status_lines(record(), JobState("running", None, "on n1"), files))
    assert lines[0] == "r1: running (on n1)"
    assert "  step 3, 10 s ago: reward_mean 0.25" in lines
    assert "  waiting for the learner, 5 s" in lines
    assert "  fleet: rollout 1 of 2" in lines
    assert "  node 10.0.0.2: rollout-0" in lines
    assert "  node n2 (h2): waiting for the head" in lines


def test_only_the_driver_itself_is_signalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.find_driver(tmp_path) is None
    driver.mark_driver(tmp_path)
    assert driver.find_driver(tmp_path) == os.getpid()
    facts = json.loads((tmp_path / driver.MARK).read_text())
    for changes in ({"host": "elsewhere"}, {"started": "1"}):
        (tmp_path / driver.MARK).write_text(json.dumps({**facts, **changes}))
        assert driver.main(["--marks", str(tmp_path), "--signal", "KILL"]) == 0  # this process lives on
    assert "no driver runs here" in capsys.readouterr().out


# ---- kubectl, through a stand-in that records what it is asked


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `kubectl` that answers from files: answers/<first words>, and writes what it got to calls."""
    folder = tmp_path / "bin"
    (folder / "answers").mkdir(parents=True)
    script = folder / "kubectl"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f"cd {folder}\n"
        'words=(); for w in "$@"; do case "$w" in --namespace=*|--request-timeout=*|--context=*) ;; '
        '*) words+=("$w");; esac; done\n'
        'printf "%s\\n" "$*" >> calls\n'
        'if [ "${words[0]}" = apply ]; then cat >> applied; echo "---" >> applied; fi\n'
        'file="answers/${words[0]}-${words[1]//\\//_}"; [ -f "$file" ] && cat "$file"; exit 0\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_kubernetes_refuses_early_then_applies_without_secrets(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-0123456789")
    file = ROOT / "cluster_configs" / "kubernetes" / "two-gpu-groups.yaml"
    words = ["weights.backend=gloo"]
    with pytest.raises(UserError) as caught:
        verbs.submit("quickstart", file, words, say=lambda _: None)
    text = str(caught.value)
    assert "KubeRay operator is not installed" in text
    assert "no PersistentVolumeClaim grpo-shared in training" in text
    assert "Secret grpo-secrets has no entry WANDB_API_KEY, HF_TOKEN" in text
    assert not (kubectl / "applied").exists()
    (kubectl / "answers" / "get-crd").write_text("crd\n")
    (kubectl / "answers" / "get-pvc").write_text("pvc\n")
    (kubectl / "answers" / "get-secret").write_text(json.dumps({"data": {"WANDB_API_KEY": "", "HF_TOKEN": ""}}))
    assert verbs.submit("quickstart", file, words, say=lambda _: None) == 0
    applied = (kubectl / "applied").read_text()
    assert "kind: ConfigMap" in applied
    assert "kind: RayJob" in applied
    assert "planted" not in applied + (kubectl / "calls").read_text()
    assert "--namespace=training" in (kubectl / "calls").read_text()
    (kubectl / "answers" / "get-rayjob").write_text(json.dumps({"status": {"jobStatus": "RUNNING"}}))
    assert KubernetesBackend().state(records.find("quickstart")).phase == "running"


def test_kubernetes_stop_is_clean_and_not_retried(kubectl: Path) -> None:
    one = record(backend="kubernetes", job="r1-abc", where={"namespace": "n", "context": None, "python": "python"})
    records.save(one)
    (kubectl / "answers" / "get-rayjob").write_text(json.dumps({"status": {"jobStatus": "RUNNING"}}))
    pod = {"metadata": {"name": "head-1", "creationTimestamp": "2026-01-01"}, "status": {"phase": "Running"}}
    (kubectl / "answers" / "get-pods").write_text(json.dumps({"items": [pod]}))
    (kubectl / "answers" / "exec-head-1").write_text("driver 7 still runs\n")
    assert verbs.stop("r1", say=lambda _: None) == 0
    calls = (kubectl / "calls").read_text()
    assert (
        "exec head-1 -c ray-head -- python -m grpo_dist.launch.driver --marks /runs/.launch/r1 --signal TERM" in calls
    )
    assert 'patch rayjob r1-abc --type=merge -p {"spec": {"backoffLimit": 0}}' in calls
    assert "delete" not in calls
    assert verbs.stop("r1", now=True, say=lambda _: None) == 0
    assert "delete rayjob r1-abc" in (kubectl / "calls").read_text()
