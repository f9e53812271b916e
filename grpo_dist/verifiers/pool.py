"""Children under a clock: each verdict has a hard limit of wall time that starts when a child begins it.

    score(items) -> for each item: wait for an idle child (not charged) -> send -> verdict | timeout | death

* An item that runs out of time costs its own verdict (``timed_out``); its child is killed and replaced.
* A child that dies (kill -9, out of memory) gives its item to a fresh child once; if that dies too, the item did it.
* While children are held up by slow items, others are forked beside them up to a bound, so quick answers do not queue
  behind a stuck one.

Runs on one event loop. Knows nothing of Ray.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpo_dist
from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError, WorkerLost
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers.child import decode_verdict, encode
from grpo_dist.verifiers.reward_model import reward_models
from grpo_dist.verifiers.reward_scorer import RewardScorer, attached, texts_of

MEMORY_BYTES = 2 << 30
START_SECONDS = 120.0
_HELD_UP_SECONDS = 0.25  # an item that takes longer does not keep its child's place in the pool


@dataclass(slots=True)
class Counts:
    """Of one pool since its start."""

    verdicts: int = 0
    timeouts: int = 0
    deaths: int = 0
    started: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)  # (seconds, item id), slowest first


class ChildDied(Exception):
    """The child's socket closed before its verdict came."""


class _Child:
    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self.reader, self.writer = pid, reader, writer

    async def judge(self, item: VerifyItem) -> Verdict:
        try:
            self.writer.write(encode(asdict(item)))
            await self.writer.drain()
            line = await self.reader.readline()
        except ConnectionError as error:
            raise ChildDied from error
        if not line.endswith(b"\n"):
            raise ChildDied
        return decode_verdict(line)


class VerifierPool:
    """``children`` items are judged at a time, and up to ``children + spares`` while some are stuck.

    Args:
        uses: the recipe's ``verifiers.use``.
        timeout: seconds of wall time for one verdict.
        memory_bytes: what one verdict may allocate on top of the imported code.
    """

    def __init__(
        self,
        uses: Sequence[VerifierUse],
        *,
        timeout: float,
        children: int = 1,
        spares: int = 3,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.uses, self.timeout, self.memory_bytes = tuple(uses), timeout, memory_bytes
        self.counts = Counts()
        self._places = _Places(children, spares)
        self._most_idle = children
        self._models = reward_models(self.uses)
        self._scorers: dict[str, RewardScorer] = {}
        self._scorers_lock = threading.Lock()
        self._idle: list[_Child] = []
        self._nursery: _Nursery | None = None
        self._starting = asyncio.Lock()
        self._children: dict[int, _Child] = {}

    async def start(self) -> None:
        """Raises RecipeError when the verifiers cannot be built, WorkerLost when their process does not come up."""
        async with self._starting:
            if self._nursery is None or self._nursery.gone:
                self._idle.clear()
                self._children.clear()
                self._nursery = await _Nursery.open(self.uses, self.memory_bytes)

    async def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order."""
        if self._models:
            items = await asyncio.to_thread(self._attach, items)
        return list(await asyncio.gather(*(self._score(item) for item in items)))

    def _attach(self, items: Sequence[VerifyItem]) -> Sequence[VerifyItem]:
        """What the reward models say; they are loaded on first use."""
        with self._scorers_lock:
            for options in self._models:
                if options.path not in self._scorers:
                    self._scorers[options.path] = RewardScorer(options)
            return attached(items, {path: scorer.score(texts_of(items)) for path, scorer in self._scorers.items()})

    async def close(self) -> None:
        if self._nursery is not None:
            await self._nursery.close()
            self._nursery = None
        self._idle.clear()
        self._children.clear()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the live children."""
        return tuple(self._children)

    async def _score(self, item: VerifyItem) -> Verdict:
        async with self._places.place() as place:
            verdict = await self._attempt(item, place)
            if verdict is None:
                verdict = await self._attempt(item, place)
        if verdict is None:
            verdict = Verdict(None, error="the process that judged this answer died, twice")
        self._count(item, verdict)
        return verdict

    async def _attempt(self, item: VerifyItem, place: _Place) -> Verdict | None:
        """None: the child died."""
        child = await self._take()
        started = time.perf_counter()
        place.watch()
        kept = False
        judging = asyncio.ensure_future(child.judge(item))
        try:
            await asyncio.wait({judging}, timeout=self.timeout)
            if not judging.done():
                await asyncio.sleep(0)  # this loop may have been late itself: what has arrived by now counts
            if not judging.done():
                self.counts.timeouts += 1
                seconds = time.perf_counter() - started
                return Verdict(None, error=f"no verdict within {self.timeout:g} s", seconds=seconds, timed_out=True)
            verdict = judging.result()
            kept = True
            return verdict
        except ChildDied:
            self.counts.deaths += 1
            return None
        finally:
            judging.cancel()
            place.settle()
            if kept and len(self._idle) < self._most_idle:
                self._idle.append(child)
            else:
                self._discard(child)

    async def _take(self) -> _Child:
        while True:
            if self._idle:
                return self._idle.pop()
            await self.start()
            assert self._nursery is not None
            try:
                child = await self._nursery.fork()
            except ConnectionError:
                continue  # the nursery went in between: start() brings up another
            self._children[child.pid] = child
            self.counts.started += 1
            return child

    def _discard(self, child: _Child) -> None:
        child.writer.close()
        self._children.pop(child.pid, None)
        if self._nursery is not None:
            self._nursery.kill(child.pid)

    def _count(self, item: VerifyItem, verdict: Verdict) -> None:
        self.counts.verdicts += 1
        slowest = self.counts.slowest
        if len(slowest) < 10 or verdict.seconds > slowest[-1][0]:
            slowest.append((verdict.seconds, item.id))
            slowest.sort(reverse=True)
            del slowest[10:]


class _Places:
    """Room for ``children`` items; one that is held up moves to one of ``spares`` extra places: the next can begin."""

    def __init__(self, children: int, spares: int) -> None:
        self.free, self.extra = children, spares
        self.waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[_Place]:
        await self.enter()
        place = _Place(self)
        try:
            yield place
        finally:
            place.settle()
            if place.moved:
                self.extra += 1
            else:
                self.leave()

    async def enter(self) -> None:
        if self.free > 0:
            self.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the turn came together with the cancellation: pass it on
            raise

    def leave(self) -> None:
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


class _Place:
    def __init__(self, places: _Places) -> None:
        self.places = places
        self.moved = False
        self.timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(_HELD_UP_SECONDS, self.move)

    def settle(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def move(self) -> None:
        if not self.moved and self.places.extra > 0:
            self.places.extra -= 1
            self.moved = True
            self.places.leave()


class _Nursery:
    """The actor's end of child.py."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process, self.control = process, control
        self.turn = asyncio.Lock()
        self.buffer = b""
        self.gone = False

    @classmethod
    async def open(cls, uses: Sequence[VerifierUse], memory_bytes: int) -> _Nursery:
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
            said = await asyncio.wait_for(nursery.line(), START_SECONDS)
        except (TimeoutError, ConnectionError) as error:
            await nursery.close()
            raise WorkerLost("verifier", f"process {process.pid}", "the judging process did not start") from error
        if "error" in said:
            await nursery.close()
            raise RecipeError(said["error"])
        return nursery

    async def line(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            data = await asyncio.get_running_loop().sock_recv(self.control, 65536)
            if not data:
                self.gone = True
                raise ConnectionResetError("the judging process has gone")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    async def fork(self) -> _Child:
        """Raises ConnectionError when the nursery has gone."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            async with self.turn:
                rights = array.array("i", [theirs.fileno()])
                self.control.sendmsg([b"fork\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                said = await self.line()
        except (ConnectionError, OSError) as error:
            self.gone = True
            ours.close()
            raise ConnectionResetError("the judging process has gone") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Child(said["pid"], reader, writer)

    def kill(self, pid: int) -> None:
        with suppress(ConnectionError):
            self.control.send(b"kill %d\n" % pid)

    async def close(self) -> None:
        self.gone = True
        self.control.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
