"""The verbs of the command line, the same on every back end: submit, jobs, status, logs, stop.

Each returns the exit status; text goes to ``say``. 0 done or asked for, 1 the run failed, 2 the input is wrong,
3 nobody answered, 85 saved and to be queued again, 130 stopped. `logs -f` and `submit --wait` end with the run's code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.submit import records
from grpo_dist.submit.backend import Backend, Unreachable, patiently
from grpo_dist.submit.cluster_file import load_cluster
from grpo_dist.submit.plan import Submission, make_submission
from grpo_dist.submit.records import JobState, Record

Say = Callable[[str], None]


def backend_of(name: str) -> Backend:
    """The back end of this name; what it needs is imported only then."""
    if name == "local":
        from grpo_dist.submit.local import LocalBackend

        return LocalBackend()
    if name == "ray":
        from grpo_dist.submit.ray_jobs import RayJobsBackend

        return RayJobsBackend()
    if name == "slurm":
        from grpo_dist.submit.slurm import SlurmBackend

        return SlurmBackend()
    if name == "kubernetes":
        from grpo_dist.submit.kubernetes import KubernetesBackend

        return KubernetesBackend()
    if name == "ssh":
        from grpo_dist.submit.ssh import SshBackend

        return SshBackend()
    from grpo_dist.submit import clouds

    if name == "skypilot":
        return clouds.RenderedOnly(name, "sky launch grpo.yaml --secret GRPO_RAY_TOKEN", clouds.skypilot)
    return clouds.RenderedOnly(name, "ray up grpo.yaml", clouds.ray_up)


def submit(
    recipe: str | Path, cluster: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False,
    wait: bool = False, say: Say = print, module: str = "grpo_dist.cli",
) -> int:  # fmt: skip
    """`grpo-dist submit RECIPE --cluster FILE [key=value …] [--dry-run] [--wait]`: prints the job id."""
    submission = make_submission(recipe, cluster, overrides, module=module, dry_run=dry_run)
    backend = backend_of(submission.loaded.cluster.backend)
    if dry_run:
        say(backend.render(submission))
        return 0
    _refuse_double(submission)
    record = backend.submit(submission, say)
    records.save(record)
    say(f"submitted {record.run} as {record.backend} job {record.job}")
    say(f"  follow it: grpo-dist logs {record.run} -f      how far: grpo-dist status {record.run}")
    return logs(record.run, follow=True, say=say) if wait else 0


def _refuse_double(submission: Submission) -> None:
    """Two runs must not write into one folder."""
    try:
        record = records.find(submission.run)
        state = backend_of(record.backend).state(record)
    except (UserError, Unreachable):
        return  # none, or one that nobody can ask any more; the run folder's lock still holds
    if not state.ended and state.phase != "unknown" and record.run_dir == str(submission.run_dir):
        raise UserError(
            f"run {submission.run} is already {state.phase} ({record.backend} job {record.job}): stop it, or choose "
            "another run.name"
        )


def jobs(*, cluster: str | Path | None = None, as_json: bool = False, say: Say = print) -> int:
    """`grpo-dist jobs [--cluster FILE] [--json]`: what was submitted from here; on a Ray cluster all runs."""
    rows = (
        _cluster_rows(cluster) if cluster is not None else [_row(record, _ask(record)) for record in records.records()]
    )
    if as_json:
        say(json.dumps(rows))
    elif not rows:
        say("no runs")
    for row in rows if not as_json else []:
        code = "" if row["exit_code"] is None else f" ({row['exit_code']})"
        say(f"{row['run']:<28} {row['backend']:<10} {row['job']:<32} {row['phase']}{code}  {row['detail']}".rstrip())
    return 0


def _cluster_rows(cluster: str | Path) -> list[dict[str, Any]]:
    loaded = load_cluster(cluster)
    if loaded.cluster.ray is None:
        known = [r for r in records.records() if Path(r.cluster_file) == loaded.path.absolute()]
        return [_row(record, _ask(record)) for record in known]
    from grpo_dist.submit.ray_jobs import list_runs

    return [
        {"run": run, "backend": "ray", "job": job, **asdict(state)} for run, job, state in list_runs(loaded.cluster.ray)
    ]


def _row(record: Record, state: JobState) -> dict[str, Any]:
    return {"run": record.run, "backend": record.backend, "job": record.job, **asdict(state)}


def _ask(record: Record) -> JobState:
    """In a list, one cluster that does not answer must not hide the others."""
    try:
        return backend_of(record.backend).state(record)
    except (Unreachable, UserError) as error:
        return JobState("unknown", None, str(error).splitlines()[0])


def status(run: str, *, as_json: bool = False, say: Say = print) -> int:
    """`grpo-dist status RUN [--json]`: state, step, reward, fleet by role and node, what is waited for."""
    record = records.find(run)
    backend = backend_of(record.backend)
    state = backend.state(record)
    progress = backend.progress(record)
    if as_json:
        say(json.dumps({**_row(record, state), "run_dir": record.run_dir, "files": progress}))
    else:
        from grpo_dist.submit.show import status_lines

        for line in status_lines(record, state, progress):
            say(line)
    return 0


def logs(run: str, *, role: str | None = None, rank: int = 0, follow: bool = False, say: Say = print) -> int:
    """`grpo-dist logs RUN [-f] [--role R --rank I]`; with ``follow`` to the end of the run, and then the run's code."""
    record = records.find(run)
    backend = backend_of(record.backend)
    for line in backend.follow(record, role=role, rank=rank, follow=follow):
        say(line)
    if not follow:
        return 0
    state = settled(backend, record)
    say(f"run {record.run} {state.phase}" + (f": {state.detail}" if state.detail else ""))
    return code_of(state)


def stop(run: str, *, now: bool = False, wait: float = 0, say: Say = print) -> int:
    """`grpo-dist stop RUN [--now] [--wait SECONDS]`: a clean stop saves at the next step boundary."""
    record = records.find(run)
    backend = backend_of(record.backend)
    backend.stop(record, now=now, say=say)
    deadline = time.monotonic() + wait
    while wait and not (state := backend.state(record)).ended:
        if time.monotonic() > deadline:
            say(f"still {state.phase} after {wait:g} s")
            return 1
        time.sleep(0.5)
    return 0


def settled(backend: Backend, record: Record, seconds: float = 30) -> JobState:
    """The state once the back end has noticed the end that the log already shows."""
    deadline = time.monotonic() + seconds
    while not (state := patiently(lambda: backend.state(record))).ended and time.monotonic() < deadline:
        time.sleep(0.5)
    return state


def code_of(state: JobState) -> int:
    """The run's own code; a run without one that has not succeeded is a failure."""
    if state.exit_code is not None:
        return state.exit_code
    return {"succeeded": 0, "stopped": 130, "requeued": 85, "unknown": 3}.get(state.phase, 1)
