"""This machine, as it is: the run in the background with a Ray of its own, its log and exit code in files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from grpo_dist.errors import GrpoDistError
from grpo_dist.launch.folder import AttemptFolder
from grpo_dist.launch.processes import is_running, started_at
from grpo_dist.submit.backend import newest_attempt, prepare_launch, shared_progress
from grpo_dist.submit.logs import shared_lines
from grpo_dist.submit.plan import Submission, shell
from grpo_dist.submit.records import JobState, Record, phase_of_exit


class LocalBackend:
    """A node runner without a cluster, detached from the terminal."""

    def render(self, submission: Submission) -> str:
        cluster = submission.loaded.cluster
        lines = [
            f"# {submission.header}",
            *[f"export {name}={shell([value])}" for name, value in cluster.environment.items()],
            *cluster.setup,
            shell(self._command(submission)),
            f"--- {submission.launch}/recipe.yaml",
        ]
        return "\n".join(lines) + f"\n{submission.recipe_text()}"

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        launch = prepare_launch(submission)
        attempt = launch / "attempt-0"
        attempt.mkdir()
        cluster = submission.loaded.cluster
        script = "\n".join([*cluster.setup, f"exec {shell(self._command(submission))}"])
        with (attempt / "node-local.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", script], env={**os.environ, **cluster.environment}, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        record = Record(
            run=submission.run, submission=submission.id, backend="local", job=str(process.pid),
            run_dir=str(submission.run_dir), launch=str(launch), cluster_file=str(submission.loaded.path.absolute()),
            where={"started": started_at(process.pid), "host": os.uname().nodename},
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not (attempt / "driver.log").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise GrpoDistError(f"the run did not start:\n{(attempt / 'node-local.log').read_text()[-1000:]}")
            time.sleep(0.1)
        return record

    def state(self, record: Record) -> JobState:
        here = record.where["host"] == os.uname().nodename
        if here and is_running(int(record.job), record.where["started"]):  # until its logs are kept
            return JobState("running", None, f"pid {record.job}")
        attempt = newest_attempt(record)
        said = attempt.exit() if attempt else None
        if said is not None:
            return JobState(phase_of_exit(int(said["code"])), int(said["code"]), str(said["why"]))
        if not here:
            return JobState("unknown", None, f"runs on {record.where['host']}, ask there")
        return JobState("failed", 137, "it was killed before it could say why")

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        return shared_lines(
            record, self.progress, lambda: self.state(record).ended, role=role, rank=rank, follow=follow
        )

    def progress(self, record: Record) -> dict[str, Any] | None:
        return shared_progress(record)

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        state, attempt = self.state(record), newest_attempt(record)
        if state.phase != "running" or attempt is None:
            say(f"the run does not run: {state.phase}")
            return
        attempt.ask("stop")
        if now:
            time.sleep(1)
            AttemptFolder(attempt.path).ask("stop")  # the second one: leave at once
        say("asked to leave at once" if now else "asked to save and stop at the next step boundary")

    @staticmethod
    def _command(submission: Submission) -> list[str]:
        cluster = submission.loaded.cluster
        python = sys.executable if cluster.python == "python" else cluster.python
        return [
            python, "-m", "grpo_dist.launch.node", "--folder", f"{submission.launch}/attempt-0", "--name", "local",
            "--role", "head", "--head", "--no-ray", "--grace", str(cluster.preemption.grace), "--",
            *submission.entry(f"{submission.launch}/recipe.yaml", python),
        ]  # fmt: skip
