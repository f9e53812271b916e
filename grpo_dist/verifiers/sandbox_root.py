"""Gives a process a file system of its own, for machines without bubblewrap. Standard library only.

Runs as the first process of new mount, PID, network, IPC and UTS namespaces (``unshare``), as their root: builds a root
of read-only binds with a small writable /tmp, turns into it, drops its capabilities and becomes the runner.

    sandbox_root.py {"binds": {source: place}, "links": {…}, "disk_bytes": n, "keep": ["SETUID", …]} COMMAND…
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = {"SETGID": 6, "SETUID": 7}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    build_root(plan)
    drop_capabilities(plan["keep"])
    os.execv(command[0], command)


def build_root(plan: dict[str, object]) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    binds: dict[str, str] = dict(plan["binds"])  # type: ignore[call-overload]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    binds |= {path: path for path in devices}
    # Opened first: what lies under the mount point of the new root is hidden as soon as that is there.
    opened = {path: os.open(path, os.O_PATH) for path in binds}
    root = "/tmp"  # any folder will do: only this process sees what is put over it
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.makedirs(root + "/tmp")
    _mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={plan['disk_bytes']}")
    for path, target in binds.items():
        _bind(opened[path], root + target, read_only=path not in devices)
        os.close(opened[path])
    links: dict[str, str] = plan["links"]  # type: ignore[assignment]
    for link, target in links.items():
        os.symlink(target, root + link)
    os.makedirs(root + "/proc")
    _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    old = root + "/old"
    os.makedirs(old)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], root.encode(), old.encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _MNT_DETACH), "umount of the old root")
    os.rmdir("/old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/tmp")


def drop_capabilities(keep: list[str]) -> None:
    """From every set; without CAP_SETPCAP afterwards, none comes back."""
    kept = sum(1 << _CAPABILITIES[name] for name in keep)
    for number in range(64):
        if not kept >> number & 1:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # beyond the last one: refused, which does no harm
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("=II", _CAPABILITY_VERSION, 0)
    sets = struct.pack("=IIIIII", kept, kept, 0, 0, 0, 0)
    _check(_libc.syscall({"x86_64": 126, "aarch64": 91}[os.uname().machine], header, sets), "capset")


def _bind(opened: int, target: str, *, read_only: bool) -> None:
    source = f"/proc/self/fd/{opened}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if read_only:
        flags = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV | 8 | 1024 | 2048)  # locked ones must be repeated
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | flags)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [one.encode() if one is not None else None for one in (source, target, kind)]
    options = data.encode() if data is not None else None
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options), f"mount of {target}")


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
