"""Ends what is left of a Ray that this run had started, however the run ended.

    driver ── pipe ──► guard: end of file (the driver is gone, by whatever cause) ─► a moment for Ray ─► SIGKILL

Most of Ray goes with its driver. Its agents may stay for minutes when it is killed while they start. The processes are
known by a mark in their environment, or as descendants of one that has it; nothing is looked up by name.

Runs as ``python -m grpo_dist.fleet.guard MARK`` and imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

MARK = "GRPO_DIST_RAY"
GRACE_SECONDS = 5.0
LIMIT_SECONDS = 60.0
FREQUENT_SECONDS = 120.0  # while a run starts, processes come quickly


def alive() -> dict[int, tuple[int, str]]:
    """(parent, start time) of every living process, by id; an id and a start time together are never used again."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def carries(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return False


def family(mark: str, known: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Living (id, start time) of what carries the mark, of what was known before, and of the descendants of both.

    A process that gives itself a title overwrites its environment: Ray's agents do, so they are known by their parent.
    """
    now = alive()
    members = {pid for pid, (_, start) in now.items() if (pid, start) in known or carries(pid, mark)}
    members.discard(os.getpid())
    while born := {pid for pid, (parent, _) in now.items() if parent in members} - members:
        members |= born
    return {(pid, now[pid][1]) for pid in members}


def end(mark: str, known: set[tuple[int, str]]) -> None:
    """Wait for the family to go, then kill it until nothing is left."""
    started = time.monotonic()
    while (known := family(mark, known)) and (waited := time.monotonic() - started) < LIMIT_SECONDS:
        if waited > GRACE_SECONDS:
            for pid, _ in known:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)


def main() -> None:
    mark, known = sys.argv[1], set[tuple[int, str]]()
    started = time.monotonic()
    while True:  # until the driver ends, by whatever cause: then its end of the pipe is closed
        tick = 0.5 if time.monotonic() - started < FREQUENT_SECONDS else 5.0
        if select.select([sys.stdin], [], [], tick)[0]:
            break
        known = family(mark, known)
    end(mark, known)


if __name__ == "__main__":
    main()
