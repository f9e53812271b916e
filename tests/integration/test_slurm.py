"""Runs under a real Slurm (three slurmd on this host) with real Ray nodes; the run itself is the stand-in.

One job at a time goes through the whole path: `submit` renders and sends, nodes find each other, roles land on their
nodes, and every way to end is told apart. Skipped where Slurm is not installed.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.doctor.verb import doctor
from grpo_dist.errors import RecipeError, UserError
from grpo_dist.launch.folder import AttemptFolder
from grpo_dist.submit import records, verbs
from tests.slurm.host import SlurmHost, slurm_host, unavailable

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

ROOT = Path(__file__).parents[2]
STAND_IN = "tests.integration.stand_in_train"
PLANTED = "planted-wandb-key-0123456789"

CLUSTER = """
backend: slurm
python: {python}
roles:
  head: {{on: learner}}
  learner: {{cpus: 2}}
  rollout: {{cpus: {rollout_cpus}}}
  verifier: {{on: rollout}}
environment: {{PYTHONPATH: "{root}", OMP_NUM_THREADS: "1"}}
secrets: [WANDB_API_KEY]
wait: 120
slurm: {{exclusive: false}}
{more}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmHost]:
    if reason := unavailable():
        pytest.skip(reason)
    with slurm_host(tmp_path_factory.mktemp("slurm")) as host:
        yield host


class Runs:
    """Submits, follows and asks, as a user would on a login node."""

    def __init__(self, slurm: SlurmHost, folder: Path) -> None:
        self.slurm, self.folder, self.out = slurm, folder, folder / "runs"
        self.said: list[str] = []

    def cluster(self, *, rollout_cpus: int = 2, more: str = "") -> Path:
        path = self.folder / "cluster.yaml"
        path.write_text(CLUSTER.format(python=sys.executable, root=ROOT, rollout_cpus=rollout_cpus, more=more))
        return path

    def submit(
        self, name: str, cluster: Path, *overrides: str, recipe: str | Path = "quickstart", module: str = STAND_IN
    ) -> records.Record:
        words = [f"run.name={name}", f"run.out={self.out}", *overrides]
        assert verbs.submit(recipe, cluster, words, say=self.said.append, module=module) == 0
        return records.find(name)

    def status(self, name: str) -> str:
        lines: list[str] = []
        assert verbs.status(name, say=lines.append) == 0
        return "\n".join(lines)

    def logs(self, name: str, **options: Any) -> tuple[int, list[str]]:
        lines: list[str] = []
        return verbs.logs(name, say=lines.append, **options), lines


@pytest.fixture
def runs(slurm: SlurmHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    monkeypatch.setenv("GRPO_DIST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    return Runs(slurm, tmp_path)


def test_the_doctor_asks_for_the_partition(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def partitions(cluster: Path) -> list[tuple[str, str]]:
        said: list[str] = []
        doctor(cluster=cluster, as_json=True, say=said.append)
        rows = json.loads(said[0])["rows"]
        return [(row["level"], row["text"]) for row in rows if row["subject"].startswith("partition")]

    cluster = runs.cluster()
    ((level, text),) = partitions(cluster)
    assert level == "ok"
    assert text.startswith("up, 3 nodes of ")
    cluster.write_text(cluster.read_text().replace("exclusive: false", "exclusive: false, partition: nowhere"))
    ((level, text),) = partitions(cluster)
    assert level == "fail"
    assert "no such partition: sinfo lists [" in text or "nvalid partition" in text


def files_with(folder: Path, text: str) -> list[Path]:
    found = []
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base) / name
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def test_submit_follow_roles_logs_and_success(runs: Runs) -> None:
    """Nodes that differ: a heterogeneous job, a component per role; everything a user can ask of it."""
    cluster = runs.cluster(rollout_cpus=1)
    record = runs.submit("ok", cluster, "run.steps=4")
    script = (Path(record.launch) / "job.sbatch").read_text()
    assert "#SBATCH hetjob" in script
    code, lines = runs.logs("ok", follow=True)
    assert code == 0, lines
    assert lines[-1] == "run ok succeeded: the run ended"
    assert [line for line in lines if line.startswith("stand-in: step")] == [
        f"stand-in: step {n}" for n in (1, 2, 3, 4)
    ]
    attempt = AttemptFolder(Path(record.launch) / "attempt-0")
    states = attempt.states()
    assert len(states) == 2
    assert stat.S_IMODE((Path(record.launch) / "ray_token").stat().st_mode) == 0o600
    # Each role on its own Slurm node, although all of them have this host's address.
    events = [json.loads(line) for line in (runs.out / "ok" / "events.jsonl").read_text().splitlines()]
    names = {event["worker"]: event["name"] for event in events}
    assert names["learner-0"] == attempt.cluster()["head"]
    assert names["rollout-0"] == names["verifier-0"] != names["learner-0"]
    assert set(names.values()) == set(states)
    _, worker = runs.logs("ok", role="rollout")
    assert any("stand-in worker says hello" in line for line in worker)
    token = (Path(record.launch) / "ray_token").read_text()
    assert files_with(runs.folder, token) == [Path(record.launch) / "ray_token"]
    assert files_with(runs.folder, PLANTED) == []
    text: list[str] = []
    assert verbs.status("ok", say=text.append) == 0
    assert text[0] == "ok: succeeded, exit code 0 (the run ended)"
    assert any("step 4" in line and "reward_mean 0.04" in line for line in text)
    assert verbs.jobs(say=text.append) == 0
    assert text[-1].split()[:4] == ["ok", "slurm", record.job, "succeeded"]
    assert verbs.stop("ok", say=text.append) == 0
    assert "already ended" in text[-1]


def test_a_failed_run_never_looks_like_success(runs: Runs) -> None:
    record = runs.submit("fail-here", runs.cluster(), "run.steps=4")
    assert "hetjob" not in (Path(record.launch) / "job.sbatch").read_text()  # nodes alike: a plain job
    code, lines = runs.logs("fail-here", follow=True)
    assert code == 1
    assert any("step 2 fails on purpose" in line for line in lines[-4:])
    assert lines[-1].startswith("run fail-here failed")
    facts = runs.slurm.wait_for(record.job, ["FAILED"])
    assert facts["ExitCode"] == "1:0"


def test_bad_recipe_is_refused_before_anything_is_sent(runs: Runs, tmp_path: Path) -> None:
    before = runs.slurm.run(["squeue", "-h"])
    with pytest.raises(RecipeError, match=r"learner\.learning_rate"):
        runs.submit("bad", runs.cluster(), "learner.learnig_rate=1e-6")
    with pytest.raises(RecipeError, match=r"1 nodes x 2 CPUs, but the recipe reserves 50"):
        runs.submit("big", runs.cluster(), "learner.ranks=100", "learner.placement.cpus=0.5")
    assert runs.slurm.run(["squeue", "-h"]) == before
    # A recipe that goes bad on the way (an unreadable file on the nodes) ends with 2, as at home.
    cluster = runs.cluster()
    cluster.write_text(cluster.read_text().replace("exclusive: false", "exclusive: false, options: [--hold]"))
    record = runs.submit("late", cluster, "run.steps=2")
    assert verbs.backend_of("slurm").state(record).phase == "pending"
    (Path(record.launch) / "recipe.yaml").write_text("run: [")
    runs.slurm.run(["scontrol", "release", record.job])
    code, lines = runs.logs("late", follow=True)
    assert code == 2, lines


def test_slurm_refuses_a_partition_that_does_not_exist(runs: Runs) -> None:
    path = runs.cluster()
    path.write_text(path.read_text().replace("exclusive: false", "exclusive: false, partition: nope"))
    with pytest.raises(UserError, match=r"Slurm refuses the job: .*partition"):
        runs.submit("nowhere", path)
