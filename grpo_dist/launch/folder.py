"""What the nodes of one attempt tell each other and the submitter, as small files on shared storage.

    launch/NAME/                    recipe.yaml  ray_token (0600)  submission.json
        attempt-0/                  cluster.json (the head)  node-<name>.json (each node's state)  exit.json (the end)
                                    control (a word: stop | requeue)  driver.log  node-<name>.log  ray-logs/<name>/

Every file is written aside and renamed, so a reader sees a whole one or none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

MOST_LOG_BYTES = 20 << 20  # of one log file; the end is what matters


class AttemptFolder:
    """One attempt's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """A new head begins here: what an earlier one left would mislead the other nodes. A fresh folder stays as it
        is: nodes that were quicker than their head may have said already that they failed."""
        if self.cluster() is None and self.exit() is None:
            return
        for path in (
            *self.path.glob("node-*.json"),
            *(self.path / n for n in ("cluster.json", "exit.json", "control")),
        ):
            path.unlink(missing_ok=True)

    def write_cluster(self, **facts: str) -> None:
        _write(self.path / "cluster.json", {**facts, "time": time.time()})

    def cluster(self) -> dict[str, Any] | None:
        return _read(self.path / "cluster.json")

    def head_address(self) -> str | None:
        facts = self.cluster()
        return str(facts["address"]) if facts and "address" in facts else None

    def set_state(self, name: str, state: str, detail: str) -> None:
        facts = {"name": name, "host": os.uname().nodename, "state": state, "detail": detail, "time": time.time()}
        _write(self.path / f"node-{name}.json", facts)

    def states(self) -> dict[str, dict[str, Any]]:
        """Node name -> what it said last."""
        found = [_read(path) for path in sorted(self.path.glob("node-*.json"))]
        return {one["name"]: one for one in found if one}

    def write_exit(self, code: int, why: str) -> None:
        _write(self.path / "exit.json", {"code": code, "why": why, "time": time.time()})

    def exit(self) -> dict[str, Any] | None:
        return _read(self.path / "exit.json")

    def exit_code(self) -> int | None:
        facts = self.exit()
        return int(facts["code"]) if facts else None

    def ask(self, word: str) -> None:
        """``stop`` or ``requeue``, to the head."""
        _replace(self.path / "control", word)

    def take_control(self) -> str:
        """The word that was asked since the last call, or ''."""
        control = self.path / "control"
        try:
            word = control.read_text().strip()
            control.unlink()
        except FileNotFoundError:
            return ""
        return word


def attempts(launch: Path) -> list[AttemptFolder]:
    """All attempts of a submission, oldest first."""
    found = [path for path in launch.glob("attempt-*") if path.name[8:].isdigit()]
    return [AttemptFolder(path) for path in sorted(found, key=lambda path: int(path.name[8:]))]


def keep_logs(temp: Path, to: Path) -> None:
    """Copy the logs of Ray's session before it is removed, each at most its last `MOST_LOG_BYTES`."""
    for source in sorted(temp.glob("session_2*/logs/*")):
        if not source.is_file() or source.is_symlink():
            continue
        to.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as log:
            log.seek(max(0, source.stat().st_size - MOST_LOG_BYTES))
            (to / source.name).write_bytes(log.read(MOST_LOG_BYTES))


def _write(path: Path, facts: dict[str, Any]) -> None:
    _replace(path, json.dumps(facts))


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return facts
