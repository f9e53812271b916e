"""A place for code that nobody has read: how strong it is here, and starting a process in it under limits.

    bubblewrap  its own users, processes, network, IPC and host name; a read-only file system of the interpreter alone
    namespaces  the same by the kernel's namespaces directly (sandbox_root.py), where bubblewrap is not installed
    limits      only resource limits and an empty environment: the network and readable files are within reach

Levels are probed by starting something in them, strongest first. A recipe says what it demands; less is refused, never
used in silence. Whatever the level: an environment without secrets, a scratch folder that is gone afterwards, limits on
CPU, memory, processes, files, their size and open ones, the memory and number of processes of the whole tree watched
from outside, and the tree killed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from grpo_dist.verifiers import sandbox_root, sandbox_runner

Level = Literal["bubblewrap", "namespaces", "limits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "limits")  # strongest first

_HERE = "/sandbox"  # where the interpreter's helpers are seen inside
_PROBE_SECONDS = 20.0
_UIDS = 200_000  # the first of the user ids that nobody else has
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox. Memory and processes hold for the whole tree, the rest for each process."""

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    disk_bytes: int = 64 << 20
    output_bytes: int = 1 << 20

    def rlimits(self) -> dict[str, int]:
        return {
            "CPU": max(1, round(self.seconds + 0.5)),
            "AS": self.memory_bytes,
            "NPROC": self.processes,
            "FSIZE": self.disk_bytes,
            "NOFILE": 64,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Way:
    """One way into a level: ``as_root`` gives each sandbox a user id of its own; otherwise a user namespace does."""

    level: Level
    as_root: bool


def strongest() -> Way:
    """The strongest level that works on this machine."""
    for level in LEVELS:
        if (way := available(level)) is not None:
            return way
    raise AssertionError("the level 'limits' always works")


def demand(level: Level) -> Way:
    """The strongest level there is. Raises ValueError when it is less than ``level``."""
    way = strongest()
    if LEVELS.index(way.level) > LEVELS.index(level):
        raise ValueError(
            f"code would run with isolation {way.level!r} on this machine, less than the demanded {level!r}: install "
            "bubblewrap (and allow user namespaces), or set the verifier's isolation to what is enough for you"
        )
    return way


@cache
def available(level: Level) -> Way | None:
    """How to get ``level`` here; None when it cannot be had. Found out by trying, once per process."""
    if level == "limits":
        return Way(level, os.getuid() == 0)
    if shutil.which("bwrap" if level == "bubblewrap" else "unshare") is None:
        return None
    for as_root in (True, False) if os.getuid() == 0 else (False,):
        way = Way(level, as_root)
        try:
            with started(way, Limits(), {"mode": "program", "code": "print(6 * 7)"}, []) as process:
                said, _ = process.communicate(timeout=_PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if said == b"42\n":
            return way
    return None


@contextmanager
def started(
    way: Way, limits: Limits, setup: dict[str, Any], fds: Sequence[int], *, packages: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A sandboxed runner, with pipes to its input and output; its whole tree is dead when the block is left.

    Args:
        setup: of sandbox_runner.main, without limits and uid; numbers of descriptors in it are those in ``fds``.
        packages: the interpreter's installed packages can be imported too.
    """
    rlimits = limits.rlimits()
    if way == Way("limits", False):
        del rlimits["NPROC"]  # it would count every process of this user
    uid = _UIDS + os.getpid() % 60_000 * 4 + len(fds) % 4 if way.as_root else 0
    setup = {"result": -1} | setup | {"limits": rlimits, "uid": uid}
    memory = os.memfd_create("setup", 0)
    scratch = tempfile.mkdtemp(prefix="grpo-sandbox-") if way.level == "limits" else None
    try:
        if setup["result"] == -1:  # a runner always says that it has started
            setup["result"] = os.open(os.devnull, os.O_WRONLY)
            fds = [*fds, setup["result"]]
        os.write(memory, json.dumps(setup).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        if scratch is not None and way.as_root:
            os.chown(scratch, uid, uid)
        process = subprocess.Popen(
            _command(way, limits, memory, packages),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[*fds, memory],
            env=_ENVIRONMENT if scratch is None else _ENVIRONMENT | {"HOME": scratch}, cwd=scratch or "/",
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            _end(process)
    finally:
        os.close(memory)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    tree = [process.pid, *descendants(process.pid)]
    for pid in tree:  # a PID namespace goes with its first process; without one, each has to be named
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, as seen from outside."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as line:
                    children = [int(child) for child in line.read().split()]
                found += children
                waiting += children
    return found


def beyond(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    """What the tree has too much of right now."""
    tree = descendants(process.pid)
    # bubblewrap and unshare have up to two processes of their own.
    if len(tree) > limits.processes + 4:
        return "processes"
    pages = 0
    for pid in tree:
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/statm", encoding="ascii") as line:
            pages += int(line.read().split()[1])
    return "memory" if pages * os.sysconf("SC_PAGE_SIZE") > limits.memory_bytes else None


class Watch:
    """The clock of a sandbox, and its limits on whole trees."""

    def __init__(self, limits: Limits, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.limits, self.processes = limits, processes
        self.end = time.monotonic() + limits.seconds
        self.looked = 0.0

    def left(self) -> float:
        """Seconds, 0 when the time is up or a tree has grown too large."""
        now = time.monotonic()
        if now - self.looked > 0.02:
            self.looked = now
            if any(beyond(process, self.limits) for process in self.processes):
                self.end = now
        return max(0.0, self.end - now)


def _command(way: Way, limits: Limits, setup: int, packages: bool) -> list[str]:
    runner = Path(sandbox_runner.__file__)
    if way.level == "limits":
        return [*_interpreter(packages), str(runner), str(setup)]
    binds, links = _file_system(packages)
    inside = [*_interpreter(packages), f"{_HERE}/runner.py", str(setup)]
    if way.level == "bubblewrap":
        return [*_bubblewrap(way, limits, binds, links, runner), *inside]
    root = Path(sandbox_root.__file__)
    keep = ["SETUID", "SETGID"] if way.as_root else []
    places = {path: path for path in binds} | {str(runner): f"{_HERE}/runner.py"}
    plan = {"binds": places, "links": links, "disk_bytes": limits.disk_bytes, "keep": keep}
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts"]
    if not way.as_root:
        namespaces += ["--user", "--map-root-user"]
    return [
        shutil.which(namespaces[0]) or namespaces[0], *namespaces[1:], "--",
        sys.executable, "-I", "-S", str(root), json.dumps(plan), *inside,
    ]  # fmt: skip


def _bubblewrap(way: Way, limits: Limits, binds: list[str], links: dict[str, str], runner: Path) -> list[str]:
    command = [
        "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL",
        "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp",
    ]  # fmt: skip
    if way.as_root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    parents = sorted({str(parent) for path in binds for parent in Path(path).parents} - {"/", "/tmp"})
    for parent in [*parents, _HERE]:  # made on the way they would be closed to other users
        command += ["--perms", "0755", "--dir", parent]
    for path in binds:
        command += ["--ro-bind", path, path]
    for link, target in links.items():
        command += ["--symlink", target, link]
    return [
        *command, "--ro-bind", str(runner), f"{_HERE}/runner.py", "--proc", "/proc", "--dev", "/dev",
        "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/",
    ]  # fmt: skip


def _interpreter(packages: bool) -> list[str]:
    """The interpreter without anything of this environment, or with its packages."""
    if packages:
        return [sys.executable, "-s", "-P", "-B"]
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [str(base if base.exists() else Path(sys.executable).resolve()), "-S", "-s", "-P", "-B"]


def _file_system(packages: bool) -> tuple[list[str], dict[str, str]]:
    """(paths bound read-only, links): the system's libraries and the interpreter, and nothing else."""
    binds, links = ["/usr"], {}
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links[name] = os.readlink(name)
        elif os.path.isdir(name):
            binds.append(name)
    needed = {sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
    if packages:
        needed |= {sys.prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    binds += sorted(path for path in needed if not path.startswith("/usr/") and path != "/usr")
    if os.path.exists("/etc/ld.so.cache"):
        binds.append("/etc/ld.so.cache")
    return binds, links
