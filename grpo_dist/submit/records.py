"""What was submitted from here, so that a run is found again by its name: one small file per run, without secrets.

    ~/.grpo_dist/runs/NAME.json      (GRPO_DIST_HOME replaces ~/.grpo_dist)

A record is how to ask, not the answer: state, progress and logs come from the scheduler and the run's own files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_dist.errors import UserError
from grpo_dist.recipe_keys import nearest_keys

Phase = Literal["pending", "running", "succeeded", "failed", "stopped", "requeued", "unknown"]
ENDED: tuple[Phase, ...] = ("succeeded", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class Record:
    """One submission."""

    run: str
    submission: str
    backend: str
    job: str  # the back end's own id
    run_dir: str  # as the nodes see it
    launch: str
    cluster_file: str
    where: dict[str, Any] = field(default_factory=dict)  # what the back end needs to find it: address, host, namespace
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class JobState:
    """What the back end says of a submission now."""

    phase: Phase
    exit_code: int | None = None  # of the run itself; None while it has none
    detail: str = ""  # what is waited for, or why it ended

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


def phase_of_exit(code: int) -> Phase:
    """130 is a clean stop; everything else that is not 0 is a failure (85 that nobody requeued included)."""
    return "succeeded" if code == 0 else "stopped" if code == 130 else "failed"


def home(env: Mapping[str, str] = os.environ) -> Path:
    return Path(env.get("GRPO_DIST_HOME") or Path.home() / ".grpo_dist") / "runs"


def save(record: Record) -> None:
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{record.run}.{os.getpid()}"
    aside.write_text(json.dumps(asdict(record), indent=1))
    aside.replace(folder / f"{record.run}.json")


def records() -> list[Record]:
    """All of them, newest first."""
    found = [Record(**json.loads(path.read_text())) for path in home().glob("*.json")]
    return sorted(found, key=lambda record: -record.created)


def find(run: str) -> Record:
    """The record of a run by its name, submission id or folder.

    Raises:
        UserError: none; names the nearest.
    """
    known = records()
    for record in known:
        if run in (record.run, record.submission, record.run_dir) or Path(run).absolute() == Path(record.run_dir):
            return record
    near = nearest_keys(run, [record.run for record in known])
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no run {run!r} was submitted from here ({home()} knows {len(known)}){hint}")
