"""End what we started and nothing else: by pid, along the tree of our own descendants, with limits.

A node runner adopts orphans (PR_SET_CHILD_SUBREAPER), so a grandchild whose parent died is still its descendant and is
still ended. No name is ever looked at: another Ray of the same user, even in the same job, is not touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent() -> None:
    """For a child, before its program starts: SIGTERM when the process that started it is gone, however it went."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def descendants(root: int) -> list[int]:
    """Every living descendant of ``root`` (not itself), parents before children; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def started_at(pid: int) -> str | None:
    """When the process began (clock ticks since boot): with the pid it names a process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def is_running(pid: int, started: str | None) -> bool:
    """Whether this very process still runs; a zombie does not, nor another one that got the same pid."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z" and (started is None or started_at(pid) == started)


def end_descendants(root: int, seconds: float, *, keep: frozenset[int] = frozenset()) -> list[int]:
    """SIGKILL all descendants of ``root`` until none is left; returns those that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in descendants(root) if pid not in keep]:
        if time.monotonic() > deadline:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.05)
    return []


def reap() -> None:
    """Collect children that have ended and that nobody else waits for (adopted ones)."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return fields[0], int(fields[1])
