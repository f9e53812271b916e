"""The processes that do the judging: one parent that has everything imported, and the children it forks.

    pool.py (in the actor)  --control socket-->  nursery (this file, imports once)  --fork-->  child, child, …
            \\______________________ one socket per child: an item in, a verdict out ______________________/

A child is replaced in milliseconds, because it is a fork of a process that has already imported sympy and the like. The
clock is not here: a stuck child cannot be trusted to stop itself, so the pool holds it and asks the nursery to kill.
Nobody survives the actor: the nursery dies with it and each child dies with the nursery (PR_SET_PDEATHSIG).

Started as ``python -m grpo_dist.verifiers.child`` with the control socket as standard input. Lines on the control
socket: in, one setup object {uses, memory_bytes}, then "fork" (with the child's socket attached) and "kill PID"; out,
one answer per line.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import fields
from typing import Any, NoReturn

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers.registry import Judge, build

_SWEEP_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def encode(value: Any) -> bytes:
    """One line. ASCII only, so that no text, not even a lone surrogate, can break the framing."""
    return json.dumps(value, ensure_ascii=True).encode() + b"\n"


_ITEM = tuple(one.name for one in fields(VerifyItem))
_VERDICT = tuple(one.name for one in fields(Verdict))


def encode_item(item: VerifyItem) -> bytes:
    return encode([getattr(item, name) for name in _ITEM])  # asdict would copy every value, deeply


def decode_item(line: bytes) -> VerifyItem:
    return VerifyItem(*json.loads(line))


def encode_verdict(verdict: Verdict) -> bytes:
    return encode([getattr(verdict, name) for name in _VERDICT])


def decode_verdict(line: bytes | bytearray) -> Verdict:
    return Verdict(*json.loads(line))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` goes, however it goes."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


class Nursery:
    def __init__(self, control: socket.socket, judge: Judge, memory_bytes: int) -> None:
        self.control = control
        self.judge = judge
        self.memory_bytes = memory_bytes
        self.children: set[int] = set()
        self.buffer = b""
        self.fds: list[int] = []

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop: nobody stays a zombie
        control = self.control.fileno()
        while True:
            ready, _, _ = select.select([control, wake_read], [], [], _SWEEP_SECONDS)
            if wake_read in ready:
                os.read(wake_read, 4096)
            self.reap()
            if control in ready and not self.serve():
                return

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self.children.discard(pid)

        self.sweep()

    def sweep(self) -> None:
        """Kill what a child has left behind: orphans come to this process, which has forked none but its children."""
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as line:
            for pid in map(int, line.read().split()):
                if pid not in self.children:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def serve(self) -> bool:
        """One read of the control socket; False at its end."""
        data, ancillary, _, _ = self.control.recvmsg(65536, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.fds += received
        if not data:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            verb, _, argument = line.partition(b" ")
            if verb == b"fork":
                self.control.sendall(encode({"pid": self.fork(self.fds.pop(0))}))
            elif verb == b"kill" and (pid := int(argument)) in self.children:
                # Not reaped yet, so the number is still this child's. The group takes what the child has started.
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        return True

    def fork(self, fd: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            _child(fd, parent, self.judge, self.memory_bytes)
        os.close(fd)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # on both sides, so that it holds whoever comes first
        self.children.add(pid)
        return pid


def _child(fd: int, parent: int, judge: Judge, memory_bytes: int) -> NoReturn:
    """A forked child's whole life. Never returns into the nursery's loop."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(PermissionError):
            os.setpgid(0, 0)
        die_with(parent)
        # The limit is on what a verdict may add to what the imports already take.
        limit = _address_space() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with socket.socket(fileno=fd) as channel:
            _judge_lines(channel, judge)
        status = 0
    finally:
        os._exit(status)


def _judge_lines(channel: socket.socket, judge: Judge) -> None:
    lines = channel.makefile("rb")
    for line in lines:
        channel.sendall(encode_verdict(judge.judge(decode_item(line))))


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


def main() -> None:
    parent = int(sys.argv[1])
    die_with(parent)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the verdicts
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a killed child come here to be reaped
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's ctrl-C is the driver's business
    setup = json.loads(control.makefile("rb", buffering=0).readline())
    try:
        judge = build([VerifierUse.model_validate(use) for use in setup["uses"]])
    except RecipeError as error:
        control.sendall(encode({"error": str(error)}))
        return
    judge.warm()
    gc.collect()
    gc.freeze()  # otherwise every collection in a child would copy what it shares with this process
    control.sendall(encode({"ready": os.getpid()}))
    Nursery(control, judge, setup["memory_bytes"]).run()


if __name__ == "__main__":
    main()
