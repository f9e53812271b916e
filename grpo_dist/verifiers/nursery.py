"""The pool's end of child.py: the process that forks judging children, and one connection per child.

    Nursery.open ─► imports once ─► fork() ─► Child ─► write(items) … said(child, verdict) … went(child)

A child answers its items in the order in which they were written. Who gets which item, and for how long, is pool.py's.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpo_dist
from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError, WorkerLost
from grpo_dist.types import Verdict
from grpo_dist.verifiers.child import decode_verdict, encode

START_SECONDS = 120.0


class Child(asyncio.Protocol):
    """One judging process. ``said`` and ``went`` are called from the event loop."""

    def __init__(self, said: Callable[[Child, Verdict], None], went: Callable[[Child], None]) -> None:
        self.said, self.went = said, went
        self.pid = 0
        self.transport: asyncio.WriteTransport
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's, in a Ray actor, is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            self.said(self, decode_verdict(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self.went(self)


class Nursery:
    """A living ``python -m grpo_dist.verifiers.child``."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process, self.control = process, control
        self.turn = asyncio.Lock()
        self.buffer = b""
        self.gone = False

    @classmethod
    async def open(cls, uses: Sequence[VerifierUse], memory_bytes: int) -> Nursery:
        """Raises RecipeError when the verifiers cannot be built, WorkerLost when the process does not come up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        path = [str(Path(grpo_dist.__file__).parents[1]), *(entry for entry in sys.path if entry)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "grpo_dist.verifiers.child", str(os.getpid()), stdin=theirs.fileno(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        nursery = cls(process, ours)
        setup = {"uses": [use.model_dump(mode="json") for use in uses], "memory_bytes": memory_bytes}
        try:
            await asyncio.get_running_loop().sock_sendall(ours, encode(setup))
            said = await asyncio.wait_for(nursery._line(), START_SECONDS)
        except (TimeoutError, ConnectionError) as error:
            await nursery.close()
            raise WorkerLost("verifier", f"process {process.pid}", "the judging process did not start") from error
        if "error" in said:
            await nursery.close()
            raise RecipeError(said["error"])
        return nursery

    async def _line(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            data = await asyncio.get_running_loop().sock_recv(self.control, 65536)
            if not data:
                self.gone = True
                raise ConnectionResetError("the judging process has gone")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    async def fork(self, said: Callable[[Child, Verdict], None], went: Callable[[Child], None]) -> Child:
        """A fresh child. Raises ConnectionError when the nursery has gone."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        child = Child(said, went)
        try:
            async with self.turn:
                rights = array.array("i", [theirs.fileno()])
                self.control.sendmsg([b"fork\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                child.pid = (await self._line())["pid"]
        except OSError as error:
            self.gone = True
            ours.close()
            raise ConnectionResetError("the judging process has gone") from error
        finally:
            theirs.close()
        await asyncio.get_running_loop().create_connection(lambda: child, sock=ours)
        return child

    def kill(self, pid: int) -> None:
        with suppress(OSError):
            self.control.send(b"kill %d\n" % pid)

    async def close(self) -> None:
        self.gone = True
        self.control.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
