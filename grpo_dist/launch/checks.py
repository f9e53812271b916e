"""Is this machine fit to be a node: shared memory, temporary space, open files, interface variables.

Each check returns findings with what to do about them; nothing is changed. Used by the node runner before Ray starts
and by `grpo-dist doctor`. Left out: GPUs (doctor/) and collectives (fleet/preflight.py).
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_dist.launch.netinfo import interface_variable_problems, interfaces

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine. ``fatal`` stops a node from starting, ``warning`` is printed."""

    level: Literal["ok", "warning", "fatal"]
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}"


def check_shared_memory(path: Path = Path("/dev/shm"), want: int = 8 * GIB) -> Finding:
    """Ray's object store, NCCL and vLLM's queues live there; a container's 64 MB makes them crash or crawl."""
    if not path.is_dir():
        return Finding("warning", "shared memory", f"{path} does not exist")
    total = shutil.disk_usage(path).total
    if total >= want:
        return Finding("ok", "shared memory", f"{path} has {_size(total)}")
    return Finding(
        "warning", "shared memory",
        f"{path} has {_size(total)}, at least {_size(want)} is wanted: docker run --shm-size=16g, or on Kubernetes an "
        "emptyDir with medium Memory mounted there (the rendered manifests have one)",
    )  # fmt: skip


def check_temporary_space(path: Path, *, refuse: int = 1 * GIB, warn: int = 10 * GIB) -> Finding:
    """Ray writes sessions, logs and spilled objects there, and stops placing work on a disk that is 95 % full."""
    free = shutil.disk_usage(path).free
    advice = f"make room, or choose another folder with TMPDIR (short: Ray's socket paths have {_SOCKET_ROOM} bytes)"
    if free < refuse:
        return Finding(
            "fatal", "temporary space", f"{path} has {_size(free)} left, {_size(refuse)} is the least: {advice}"
        )
    if free < warn:
        return Finding("warning", "temporary space", f"{path} has {_size(free)} left: {advice}")
    return Finding("ok", "temporary space", f"{path} has {_size(free)} left")


_SOCKET_ROOM = 107
_SESSION_TAIL = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1")


def check_temporary_length(path: Path) -> Finding:
    """A socket's path has 107 bytes; Ray's session name and socket name take most of them."""
    length = len(str(path)) + _SESSION_TAIL
    if length <= _SOCKET_ROOM:
        return Finding("ok", "temporary path", f"{path} is short enough")
    return Finding(
        "fatal", "temporary path",
        f"{path} is too long by {length - _SOCKET_ROOM} bytes for Ray's sockets: set TMPDIR to a shorter folder",
    )  # fmt: skip


def check_open_files(want: int = 65_536) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= want:
        return Finding("ok", "open files", f"limit {soft}")
    return Finding("warning", "open files", f"limit {soft} (hard {hard}), at least {want} is wanted: ulimit -n {want}")


def check_interface_variables(env: Mapping[str, str]) -> list[Finding]:
    found = [Finding("fatal", "network", problem) for problem in interface_variable_problems(env, interfaces())]
    return found or [Finding("ok", "network", "interface variables name what is there")]


def node_findings(temp: Path, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """All of the above for a node that keeps Ray's session in ``temp``."""
    return [
        check_shared_memory(), check_temporary_space(temp), check_temporary_length(temp), check_open_files(),
        *check_interface_variables(env),
    ]  # fmt: skip


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1024 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError
