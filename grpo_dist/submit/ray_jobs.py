"""An existing Ray cluster, through its Jobs API: also the way onto clusters that `ray up`, SkyPilot or KubeRay made.

    versions equal? token right? upload small enough? ─► one zip (recipe, working_dir) ─► a job whose driver is the run

No secret travels: what lies in a job's environment or command line is readable by everybody who may list jobs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.submit.backend import patiently, shared_progress
from grpo_dist.submit.cluster import ClusterFile, RaySection
from grpo_dist.submit.logs import live_texts, worker_place
from grpo_dist.submit.plan import Submission, ray_version, shell
from grpo_dist.submit.ray_api import RayApi, whole_lines
from grpo_dist.submit.records import JobState, Phase, Record
from grpo_dist.submit.tokens import find_token
from grpo_dist.submit.upload import files_of, pack

_PHASES: dict[str, Phase] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}
RECIPE = "grpo-recipe.yaml"  # in the job's working folder


class RayJobsBackend:
    """Jobs on a cluster that is already there."""

    def render(self, submission: Submission) -> str:
        """The request, and what goes along with it."""
        cluster, section = submission.loaded.cluster, _section(submission.loaded.cluster)
        folder = _working_dir(section)
        files = [name for _, name in files_of(folder, section.excludes)] if folder else []
        body = yaml.safe_dump(_body(submission, cluster, "gcs://… (the zip below)"), sort_keys=False, width=120)
        return (
            f"# {submission.header}\n# POST {section.address}/api/jobs/\n{body}"
            f"# the zip: {RECIPE}"
            + "".join(f"\n#   {name}" for name in files)
            + f"\n--- {RECIPE}\n{submission.recipe_text()}"
        )

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        cluster, section = submission.loaded.cluster, _section(submission.loaded.cluster)
        api = _api(section)
        check_version(api)
        folder = _working_dir(section)
        for source in (Path(entry.source) for entry in submission.recipe.data.sources):
            if not source.is_absolute() and source.exists() and not (folder and _is_sent(folder, source, section)):
                raise UserError(
                    f"data.source {source} is a file here, but not on the cluster: name a folder that holds it as "
                    "ray.working_dir, or put it on storage that the nodes see and give its absolute path"
                )
        data = pack(submission.recipe_text(), folder, section.excludes, section.upload_limit)
        say(f"sending {len(data) / 1e6:.2f} MB to {section.address}")
        job = api.submit(_body(submission, cluster, api.upload(data)))
        return Record(
            run=submission.run, submission=submission.id, backend="ray", job=job, run_dir=str(submission.run_dir),
            launch=str(submission.launch), cluster_file=str(submission.loaded.path.absolute()),
            where={"ray": section.model_dump(mode="json"), "python": cluster.python},
        )  # fmt: skip

    def state(self, record: Record) -> JobState:
        facts = _api(_of(record)).job(record.job)
        if facts is None:
            return JobState(
                "unknown", None, f"the cluster does not know job {record.job}: it was restarted, or is another one"
            )
        return state_of(facts)

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        api = _api(_of(record))

        def ended() -> bool:
            return patiently(lambda: self.state(record)).phase not in ("pending", "running")

        if role is not None:
            node, pid = worker_place(self.progress(record), role, rank)
            if node is None:
                raise GrpoDistError(f"the run's events do not say on which node {role}-{rank} lives")
            return whole_lines(live_texts(api, node, pid, ended, follow=follow))
        if follow:
            return whole_lines(api.tail(record.job, ended))
        return iter(api.log(record.job).splitlines())

    def progress(self, record: Record) -> dict[str, Any] | None:
        """Read by a short job on the head: the run folder is on the cluster's storage, not here."""
        if Path(record.run_dir).is_dir():
            return shared_progress(record)
        words = ["-m", "grpo_dist.launch.peek", "--launch", record.launch, "--run", record.run_dir]
        said = self._short_job(record, [record.where["python"], *words]) or ""
        found = [line for line in said.splitlines() if line.startswith("{")]
        answer: dict[str, Any] | None = json.loads(found[-1]) if found else None
        return answer

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        """SIGTERM to the driver, SIGKILL after preemption.grace; ``now``: SIGKILL by a short job on the head."""
        state = self.state(record)
        if state.ended:
            say(f"the run has already ended: {state.phase}")
        elif now:
            words = ["-m", "grpo_dist.launch.driver", "--marks", record.launch, "--signal", "KILL", "--wait", "20"]
            self._short_job(record, [record.where["python"], *words])
            say("killed")
        else:
            _api(_of(record)).stop(record.job)
            say("asked to save and stop at the next step boundary")

    def _short_job(self, record: Record, command: list[str]) -> str | None:
        """What a command on the head prints, or None when it fails or does not end within a minute."""
        api = _api(_of(record))
        job = api.submit({"entrypoint": shell(command), "metadata": {"grpo_kind": "helper", "grpo_run": record.run}})
        deadline = time.monotonic() + 60
        while (state := state_of(api.job(job) or {})).phase in ("pending", "running", "unknown"):
            if time.monotonic() > deadline:
                api.stop(job)
                return None
            time.sleep(0.5)
        return api.log(job) if state.phase == "succeeded" else None


def _body(submission: Submission, cluster: ClusterFile, uri: str) -> dict[str, Any]:
    return {
        "entrypoint": shell(submission.entry(RECIPE)),
        "submission_id": submission.id,
        "runtime_env": {
            "working_dir": uri,
            # How long the driver has to save when it is asked to stop; Ray's default is 3 seconds.
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(cluster.preemption.grace)},
        },
        "metadata": {"grpo_kind": "train", "grpo_run": submission.run, "grpo_submission": submission.id},
    }


def check_version(api: RayApi) -> None:
    """Raises UserError when the cluster runs another Ray than this machine."""
    if (have := api.version()) != (want := ray_version()):
        raise UserError(
            f"the cluster runs Ray {have}, this machine {want}: both must have the same version and grpo_dist"
        )


def state_of(facts: dict[str, Any]) -> JobState:
    """From the Jobs API's view of a job."""
    phase = _PHASES.get(str(facts.get("status")), "unknown")
    code = facts.get("driver_exit_code")
    message = str(facts.get("message") or "")
    if phase == "succeeded":
        return JobState(phase, 0)
    if phase == "stopped":
        return JobState(phase, 130 if code in (None, 0) else int(code), "stopped")
    if phase == "failed":
        if code is None and (found := re.search(r"exit code (\d+)", message)):
            code = int(found[1])
        first = message.split(", last available logs")[0].strip()
        return JobState("stopped" if code == 130 else phase, int(code) if code else 1, first)
    return JobState(phase, None, message.splitlines()[0] if message and phase == "pending" else "")


def list_runs(section: RaySection) -> list[tuple[str, str, JobState]]:
    """(run, job, state) of every training run on the cluster, whoever submitted it."""
    found = []
    for facts in _api(section).jobs():
        metadata = facts.get("metadata") or {}
        if metadata.get("grpo_kind") == "train":
            found.append((str(metadata.get("grpo_run")), str(facts.get("submission_id")), state_of(facts)))
    return found


def _section(cluster: ClusterFile) -> RaySection:
    assert cluster.ray is not None
    return cluster.ray


def _of(record: Record) -> RaySection:
    return RaySection.model_validate(record.where["ray"])


def _api(section: RaySection) -> RayApi:
    return RayApi(section.address, find_token(section.token) if section.authentication == "token" else None)


def _working_dir(section: RaySection) -> Path | None:
    if section.working_dir is None:
        return None
    folder = Path(section.working_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"ray.working_dir {folder} is not a folder here")
    return folder


def _is_sent(folder: Path, source: Path, section: RaySection) -> bool:
    """Whether the relative path means the same in the job's working folder."""
    return (folder / source).exists() and (
        (folder / source).is_dir() or str(source) in {name for _, name in files_of(folder, section.excludes)}
    )
