"""Weights & Biases, kept at arm's length: an outage, a full disk or a hang of W&B never stops or slows training.

    Tracker.log ─► queue ─► writer thread ─► pipe ─► child process (wandb_child.py): the only place that imports wandb
                     full or child gone: dropped, one warning          │ starts online, or offline when that fails

Every wandb call, from login to finish, happens in the child. Training only puts a line into a queue. When the run ends
the child gets ``close_seconds`` to hand over what it has; after that it is ended, and what it wrote is in
``OUT/NAME/wandb`` for ``wandb sync``. If the driver is killed, the child sees the pipe close, finishes and goes.

W&B drops a row whose step is lower than the last one. So rows are numbered by a counter that only rises (kept over
resumes in ``wandb/grpo_dist.json``) and the training step is a column of its own, which the charts use as their x axis.
W&B takes no row back either, so the same file has the highest step that was handed over, for each kind of row: a
resumed run that does a step again does not send it again.
"""

from __future__ import annotations

import json
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_dist.config import Recipe
from grpo_dist.monitor.records import as_json

INIT_SECONDS = 30.0  # for the online start; then the child goes on offline
CLOSE_SECONDS = 30.0
QUEUE_LINES = 10_000


class Tracker(Protocol):
    """What the loop knows of a tracker."""

    run_id: str | None  # goes into the checkpoint; a resumed run hands it back

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step (or of the evaluation after it)."""

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Sample completions for people to read."""

    def alert(self, step: int, text: str) -> None:
        """A warning for people who do not look at the console."""

    def close(self, exit_code: int = 0) -> None:
        """Hand over what is left, within a limit."""


class NullTracker:
    """Tracks nothing; so the loop has no "is W&B on?" branch."""

    run_id: str | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        return

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        return

    def alert(self, step: int, text: str) -> None:
        return

    def close(self, exit_code: int = 0) -> None:
        return


def open_tracker(
    recipe: Recipe,
    run_dir: Path,
    *,
    run_id: str | None = None,
    resumed_step: int | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Tracker:
    """The tracker that a recipe asks for; returns at once, whatever W&B does.

    Args:
        run_id: of the run that is resumed (from its checkpoint); the folder's own id is used without it.
        resumed_step: the step a resumed run goes on from. With it, or with run_id, rows that W&B already has are not
            sent again; without both this is a new try, and everything is sent.
        warn: called at most once, from another thread, with a sentence for the user.
    """
    mode = recipe.tracking.wandb.mode
    if mode == "disabled":
        return NullTracker()
    return WandbTracker(
        recipe,
        run_dir,
        run_id=run_id,
        resumed_step=resumed_step,
        online={"online": True, "offline": False}.get(mode),
        warn=warn,
    )


class WandbTracker:
    """Talks to the child process that owns wandb."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        *,
        run_id: str | None,
        online: bool | None,
        warn: Callable[[str], None],
        resumed_step: int | None = None,
        init_seconds: float = INIT_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        stored = _stored(run_dir)
        resumed = run_id or stored.get("id")
        self.run_id: str | None = str(resumed or secrets.token_hex(4))
        again = resumed == stored.get("id") and (run_id is not None or resumed_step is not None)
        self._had: dict[str, int] = _steps(stored.get("sent")) if again else {}  # kind -> highest step W&B has
        self._run_dir = run_dir
        self._close_seconds = close_seconds
        self._warn_user, self._warned = warn, threading.Lock()
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        section = recipe.tracking.wandb
        start = {
            "online": online,  # null: online when a key is there
            "init_seconds": init_seconds,
            "finish_seconds": max(1.0, close_seconds - 5),
            "run_dir": str(run_dir),
            "row": int(stored.get("row", 0)) if resumed == stored.get("id") else 0,
            "sent": self._had,
            "init": {
                "id": self.run_id,
                "resume": "allow" if resumed else None,
                "project": section.project,
                "entity": section.entity,
                "name": recipe.run.name,
                "tags": list(section.tags),
                "config": recipe.model_dump(mode="json"),
            },
        }
        self._lines.put(json.dumps(start))
        try:
            self._child: subprocess.Popen[str] | None = subprocess.Popen(
                [sys.executable, "-m", "grpo_dist.monitor.wandb_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._child = None
            self._warn(f"W&B could not be started: {error}")
            return
        self._writer = threading.Thread(target=self._write, name="wandb-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="wandb-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        evaluation = bool(values) and all(name.startswith("eval/") for name in values)
        self._send("eval" if evaluation else "train", step, {"log": {"step": step, **values}})

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        content = {"name": name, "step": step, "columns": list(columns), "rows": [list(r) for r in rows]}
        self._send(f"table {name}", step, {"table": content})

    def alert(self, step: int, text: str) -> None:
        self._send("alert", step, {"alert": text})

    def close(self, exit_code: int = 0) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        self._put(json.dumps({"finish": exit_code}))
        self._put(None)
        try:
            child.wait(self._close_seconds)
        except subprocess.TimeoutExpired:
            child.kill()  # wandb's own service process ends when its parent is gone
            child.wait()
            self._warn(
                f"W&B did not finish within {self._close_seconds:g} s and was left behind; "
                f"its files are in {self._run_dir / 'wandb'}: upload them with `wandb sync`"
            )
        self._writer.join(1)
        self._reader.join(1)

    def _send(self, kind: str, step: int, message: Mapping[str, Any]) -> None:
        if self._child is not None and step > self._had.get(kind, -1):
            self._put(json.dumps(as_json({**message, "kind": kind, "of": step})))

    def _put(self, line: str | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._warn("W&B does not keep up; rows are left out there (metrics.jsonl has them all)")

    def _write(self) -> None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        try:
            while (line := self._lines.get()) is not None:
                child.stdin.write(line + "\n")
                child.stdin.flush()
            child.stdin.close()
        except (OSError, ValueError):
            self._warn("W&B's process ended early; rows are left out there (metrics.jsonl has them all)")

    def _read(self) -> None:
        child = self._child
        assert child is not None
        assert child.stdout is not None
        for line in child.stdout:
            self._warn(line.strip())

    def _warn(self, text: str) -> None:
        if text and self._warned.acquire(blocking=False):  # never released: one warning per run
            self._warn_user(text)


def _steps(sent: Any) -> dict[str, int]:
    return {k: v for k, v in sent.items() if isinstance(v, int)} if isinstance(sent, dict) else {}


def _stored(run_dir: Path) -> dict[str, Any]:
    """Id, last row and highest steps of an earlier part of this run; see wandb_child.py."""
    try:
        stored = json.loads((run_dir / "wandb" / "grpo_dist.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
