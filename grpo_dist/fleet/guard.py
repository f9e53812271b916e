"""Ends what is left of a Ray that this run had started, however the run ended.

    driver ── pipe ──► guard: end of file (the driver is gone, by whatever cause) ─► a moment for Ray ─► SIGKILL

Most of Ray goes with its driver. Its agents may stay for minutes when it is killed while they start. The processes are
known by a mark in their environment, which only this Ray and its descendants have; nothing is looked up by name.

Runs as ``python -m grpo_dist.fleet.guard MARK`` and imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "GRPO_DIST_RAY"
GRACE_SECONDS = 5.0
LIMIT_SECONDS = 60.0


def marked(mark: str) -> list[int]:
    """Living processes of this user that carry the mark."""
    needle, found = f"{MARK}={mark}\0".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes() and ") Z " not in (entry / "stat").read_text():
                found.append(int(entry.name))
        except OSError:  # gone, or somebody else's
            continue
    return found


def end(mark: str) -> None:
    """Wait for the marked processes to go, then kill them until none is left."""
    started = time.monotonic()
    while (left := marked(mark)) and (waited := time.monotonic() - started) < LIMIT_SECONDS:
        if waited > GRACE_SECONDS:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)


def main() -> None:
    sys.stdin.buffer.read()  # until the driver ends, by whatever cause
    end(sys.argv[1])


if __name__ == "__main__":
    main()
