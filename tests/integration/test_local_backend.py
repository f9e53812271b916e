"""Back end `local` for real: the run in the background with a Ray of its own; the run itself is the stand-in.

Submit, ask, follow from another process, stop cleanly, submit again, and a runner that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_dist.errors import UserError
from grpo_dist.launch.processes import descendants, is_running, started_at
from grpo_dist.submit import records, verbs

pytestmark = [pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PLANTED = "planted-local-key-0123456789"


def until(done: Callable[[], bool], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_DIST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    body = {
        "backend": "local", "secrets": ["WANDB_API_KEY"], "storage": {"runs": str(tmp_path / "runs")},
        "environment": {"PYTHONPATH": str(ROOT), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
    }  # fmt: skip
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(body))
    return path


def test_submit_ask_follow_stop_and_kill(cluster: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def submit() -> records.Record:
        words = ["run.name=here", "run.steps=100000"]
        assert (
            verbs.submit("quickstart", cluster, words, say=said.append, module="tests.integration.stand_in_train") == 0
        )
        return records.find("here")

    def state() -> tuple[str, int | None]:
        now = verbs.backend_of("local").state(records.find("here"))
        return now.phase, now.exit_code

    run = tmp_path / "runs" / "here"

    def steps() -> int:
        path = run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    record = submit()
    assert Path(record.run_dir) == run
    until(lambda: steps() >= 2, "no step")
    with pytest.raises(UserError, match="run here is already running"):
        submit()
    assert verbs.status("here", say=said.append) == 0
    assert any(line == f"here: running (pid {record.job})" for line in said)
    # A client in another process follows to the end and ends with the run's own code.
    code = "import sys; from grpo_dist.submit import verbs; sys.exit(verbs.logs('here', follow=True))"
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers: list[str] = []
    assert verbs.logs("here", role="rollout", say=workers.append) == 0
    assert any("stand-in worker says hello" in line for line in workers)
    assert verbs.stop("here", wait=60, say=said.append) == 0
    out, _ = client.communicate(timeout=60)
    assert client.returncode == 130, out
    assert "ends with 130" in out
    assert state() == ("stopped", 130)
    workers.clear()
    assert verbs.logs("here", role="rollout", say=workers.append) == 0  # now from the files that were kept
    assert any("stand-in worker says hello" in line for line in workers)

    # The runner is killed: the run is told and leaves, nothing stays, and nobody calls it a success.
    before = steps()
    record = submit()
    until(lambda: steps() > before, "no step of the second submission")
    tree = {pid: started_at(pid) for pid in descendants(int(record.job))}
    assert len(tree) > 3
    os.kill(int(record.job), signal.SIGKILL)
    until(lambda: not any(is_running(pid, started) for pid, started in tree.items()), "something outlives the runner")
    assert state() == ("failed", 137)
    lines: list[str] = []
    assert verbs.logs("here", follow=True, say=lines.append) == 137
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path
