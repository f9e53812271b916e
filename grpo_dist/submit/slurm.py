"""Slurm: sbatch, scontrol and scancel, with the run's own files for everything Slurm does not know.

Left out: accounting (sacct). Slurm forgets a finished job after MinJobAge; the run's exit.json does not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.submit.backend import Unreachable, newest_attempt, patiently, prepare_launch, shared_progress
from grpo_dist.submit.logs import shared_lines
from grpo_dist.submit.plan import Submission
from grpo_dist.submit.records import JobState, Record, phase_of_exit
from grpo_dist.submit.slurm_script import render

_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED"}
_PENDING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_STOPPED = {"CANCELLED"}


class SlurmBackend:
    """One batch job per run."""

    def render(self, submission: Submission) -> str:
        return render(submission)

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        if shutil.which("sbatch") is None:
            raise UserError("sbatch is not on PATH: submit from a login node of the Slurm cluster")
        launch = prepare_launch(submission)
        script = launch / "job.sbatch"
        script.write_text(render(submission))
        job = _slurm(["sbatch", "--parsable", str(script)]).strip().split(";")[0]
        return Record(
            run=submission.run, submission=submission.id, backend="slurm", job=job, run_dir=str(submission.run_dir),
            launch=str(launch), cluster_file=str(submission.loaded.path.absolute()),
        )  # fmt: skip

    def state(self, record: Record) -> JobState:
        facts = job_facts(record.job)
        attempt = newest_attempt(record)
        code = attempt.exit_code() if attempt else None
        if facts is None:  # Slurm has forgotten it
            if code is None:
                return JobState("failed", None, "Slurm no longer knows the job, and it left no exit code")
            return JobState(phase_of_exit(code), code, _why(attempt))
        state = facts["JobState"]
        if state in _PENDING:
            restarts = int(facts.get("Restarts", "0"))
            again = restarts > 0 or code is not None
            return JobState("requeued" if again else "pending", None, f"waits in Slurm: {facts.get('Reason', '')}")
        if state in _RUNNING:
            return JobState("running", None, f"on {facts.get('NodeList', '')}, {facts.get('RunTime', '')}")
        if state in _STOPPED and code is None:
            return JobState("stopped", 130, "cancelled")
        if code is None or (code == 0 and state != "COMPLETED"):
            code = _exit_of(facts) or 1
            return JobState(
                "failed", code, f"Slurm says {state} {facts.get('Reason', '')}; see {record.launch}/slurm-*.out"
            )
        return JobState(phase_of_exit(code), code, _why(attempt))

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        def ended() -> bool:
            return patiently(lambda: self.state(record)).ended

        return shared_lines(record, self.progress, ended, role=role, rank=rank, follow=follow)

    def progress(self, record: Record) -> dict[str, Any] | None:
        return shared_progress(record)

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        attempt, state = newest_attempt(record), self.state(record)
        if state.ended:
            say(f"the run has already ended: {state.phase}")
        elif now or state.phase != "running" or attempt is None or attempt.exit_code() is not None:
            _slurm(["scancel", record.job])
            say(f"job {record.job} cancelled")
        else:
            attempt.ask("stop")
            say("asked to save and stop at the next step boundary")


def job_facts(job: str) -> dict[str, str] | None:
    """`scontrol show job`, or None when Slurm does not know the job any more."""
    try:
        text = _slurm(["scontrol", "show", "job", "-o", job])
    except Unreachable as error:
        if "Invalid job id" in str(error):
            return None
        raise
    first = text.splitlines()[0]  # of a heterogeneous job: the leader
    return dict(re.findall(r"(\S+?)=(\S*)", first))


def _exit_of(facts: dict[str, str]) -> int | None:
    code, _, by_signal = facts.get("ExitCode", "0:0").partition(":")
    return int(code) or (128 + int(by_signal or 0) if int(by_signal or 0) else None)


def _why(attempt: Any) -> str:
    return str((attempt.exit() or {}).get("why", "")) if attempt else ""


def _slurm(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{command[0]}: {error}") from error
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr or done.stdout).strip()
    if command[0] == "sbatch" and "error" in said.lower() and "contact" not in said.lower():
        raise UserError(f"Slurm refuses the job: {said}")
    raise Unreachable(f"{' '.join(command)}: {said}")
