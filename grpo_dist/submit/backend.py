"""What a back end does for the verbs, whatever the scheduler behind it; and the parts that several of them share.

render ─► check ─► submit ─► Record        state, follow, stop, progress: from the Record alone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grpo_dist.errors import GrpoDistError
from grpo_dist.launch.folder import AttemptFolder, attempts
from grpo_dist.launch.peek import peek
from grpo_dist.submit.plan import Submission
from grpo_dist.submit.records import JobState, Record


class Unreachable(GrpoDistError):
    """The scheduler or cluster did not answer: nothing is known about the run."""

    exit_code = 3


Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], *, seconds: float = 120, pause: float = 3) -> Answer:
    """``ask()`` again while nobody answers: following a run outlives the bad minutes of a scheduler or a network.

    Raises:
        Unreachable: nobody did within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(pause)


class Backend(Protocol):
    """One kind of cluster. Left for live scaling: ``scale(record, role, count)`` and ``drain(record, node)``."""

    def render(self, submission: Submission) -> str:
        """Exactly what would be sent, without secrets."""

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        """Refuse early, or send it.

        Raises:
            UserError: something the user has to change. Unreachable: no answer.
        """

    def state(self, record: Record) -> JobState:
        """Raises Unreachable when nobody answers."""

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of the driver's log, or of one worker's; with ``follow`` until the run has ended."""

    def progress(self, record: Record) -> dict[str, Any] | None:
        """`peek` of the run's files, or None where they cannot be read from here."""

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        """Ask the run to save and end; ``now``: end it without saving."""


def prepare_launch(submission: Submission) -> Path:
    """The launch folder on storage that this machine shares with the nodes, with the recipe in it."""
    launch = Path(submission.launch)
    launch.mkdir(parents=True, exist_ok=True)
    (launch / "recipe.yaml").write_text(submission.recipe_text())
    # Attempts of an earlier submission of this run belong to it: they are kept, under its own name.
    for old in attempts(launch):
        kept = launch / f"before-{int(time.time())}"
        kept.mkdir(exist_ok=True)
        old.path.rename(kept / old.path.name)
    return launch


def newest_attempt(record: Record) -> AttemptFolder | None:
    tries = attempts(Path(record.launch))
    return tries[-1] if tries else None


def shared_progress(record: Record) -> dict[str, Any] | None:
    return peek(Path(record.launch), Path(record.run_dir))


def follow_files(
    record: Record, ended: Callable[[], bool], *, follow: bool, poll: float = 0.5, name: str = "driver.log"
) -> Iterator[str]:
    """Lines of ``name`` of every attempt in turn; with ``follow`` waits for more until ``ended()`` says so."""
    done: dict[Path, int] = {}
    while True:
        over = ended() if follow else True
        for attempt in attempts(Path(record.launch)):
            path = attempt.path / name
            if not path.exists():
                continue
            if path not in done and attempt.path.name != "attempt-0":
                yield f"--- {attempt.path.name}"
            text, done[path] = _read_from(path, done.get(path, 0), whole=over)
            yield from text.splitlines()
        if over:
            return
        time.sleep(poll)


def _read_from(path: Path, offset: int, *, whole: bool) -> tuple[str, int]:
    """New text of a growing file up to the last complete line (all of it when ``whole``), and the new offset."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    if not whole:
        data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace"), offset + len(data)
