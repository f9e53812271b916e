"""Children under a clock: each verdict has a hard limit of wall time that starts when its turn in a child comes.

    score(items) ─► queue ─► a child with room (waiting is not charged) ─► verdict | timeout | death

* A child gets a few items ahead while verdicts are quick, so that neither side waits for the other; only the first of
  them is on the clock. When that one is held up, those behind it go back to the head of the queue, for other children.
* An item that runs out of time costs its own verdict (``timed_out``); its child is killed and replaced.
* A child that dies (kill -9, out of memory) gives its item to a fresh child once; if that dies too, the item did it.
* While children are held up by slow items, others are forked beside them up to a bound, so quick answers do not queue
  behind a stuck one.

Each item gets one verdict, whatever became of the children that began it. Runs on one event loop, in callbacks: a task
per item would cost more than a cheap verdict. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from grpo_dist.config import VerifierUse
from grpo_dist.errors import WorkerLost
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers.child import encode_item
from grpo_dist.verifiers.nursery import Child, Nursery

MEMORY_BYTES = 2 << 30
_HELD_UP_SECONDS = 0.25  # an item that takes longer does not keep its child's place in the pool
_AHEAD_SECONDS = 0.02  # of work that a child may have before it
_MOST_AHEAD = 32  # items
_STARTS = 3  # of a nursery, for one child


@dataclass(slots=True)
class Counts:
    """Of one pool since its start."""

    verdicts: int = 0
    timeouts: int = 0
    deaths: int = 0
    started: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)  # (seconds, item id), slowest first


@dataclass(slots=True, eq=False)
class _Call:
    """One ``score``: its verdicts as they come."""

    verdicts: list[Verdict | None]
    left: int
    done: asyncio.Future[None]
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    item: VerifyItem
    call: _Call
    index: int
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Work:
    """What one child has before it; the first job is on the clock."""

    jobs: deque[_Job] = field(default_factory=deque)
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    held_up: bool = False
    spare: bool = False  # its place was given to another child
    last: bool = False  # what was behind the job at hand was taken back, so the child must not go on


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
        self.children, self.spares = children, spares
        self.counts = Counts()
        self._queue: deque[_Job] = deque()
        self._idle: list[Child] = []
        self._busy: dict[Child, _Work] = {}
        self._hiring: set[asyncio.Task[None]] = set()
        self._mean: float | None = None  # seconds of a verdict, lately
        self._nursery: Nursery | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Raises RecipeError when the verifiers cannot be built, WorkerLost when their process does not come up."""
        async with self._starting:
            if self._nursery is None or self._nursery.gone:
                self._nursery = await Nursery.open(self.uses, self.memory_bytes)

    async def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order. Raises what ``start`` raises."""
        if not items:
            return []
        call = _Call([None] * len(items), len(items), asyncio.get_running_loop().create_future())
        self._queue.extend(_Job(item, call, index) for index, item in enumerate(items))
        self._pump()
        try:
            await call.done
        except asyncio.CancelledError:
            self._forget(call)
            raise
        return [verdict for verdict in call.verdicts if verdict is not None]

    async def close(self) -> None:
        self._closed = True
        for task in self._hiring:
            task.cancel()
        for child, work in list(self._busy.items()):
            self._stop_clock(work)
            child.transport.abort()
        for child in self._idle:
            child.transport.abort()
        self._fail(WorkerLost("verifier", "pool", "closed while it was scoring"))  # looks at who is busy
        self._idle.clear()
        self._busy.clear()
        if self._nursery is not None:
            await self._nursery.close()
            self._nursery = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the live children."""
        return tuple(child.pid for child in (*self._idle, *self._busy))

    # --- who gets what -----------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Children that may still begin something."""
        return self.children - len(self._hiring) - sum(not work.spare for work in self._busy.values())

    def _pump(self) -> None:
        """Give out queued jobs to idle children, and fork children while there is room for more."""
        room = self._room()
        while self._queue and self._idle and room > 0:
            self._feed(self._idle.pop(), _Work())
            room -= 1
        for _ in range(min(room, len(self._queue) - len(self._hiring))):
            task = asyncio.ensure_future(self._hire())
            self._hiring.add(task)
            task.add_done_callback(self._hired)

    def _feed(self, child: Child, work: _Work) -> None:
        """Put jobs before a child: as many as keep it busy for a moment, and never all that its peers could do."""
        most = max(1, min(self._ahead(), -(-len(self._queue) // self.children)))
        was_empty = not work.jobs
        lines = []
        while self._queue and len(work.jobs) < most:
            job = self._queue.popleft()
            if not job.call.cancelled:
                work.jobs.append(job)
                lines.append(encode_item(job.item))
        if not work.jobs:
            self._rest(child)
            return
        self._busy[child] = work
        child.transport.write(b"".join(lines))
        if was_empty:
            self._start_clock(child, work)

    def _ahead(self) -> int:
        return 1 if self._mean is None else min(_MOST_AHEAD, int(_AHEAD_SECONDS / max(self._mean, 1e-6)))

    def _rest(self, child: Child) -> None:
        """A child without work: kept for the next, or ended when the pool has enough."""
        self._busy.pop(child, None)
        if len(self._idle) + sum(not work.spare for work in self._busy.values()) < self.children:
            self._idle.append(child)
        else:
            self._end(child)

    def _end(self, child: Child) -> None:
        """Kill a child and whatever it has started."""
        self._busy.pop(child, None)
        child.transport.abort()
        if self._nursery is not None:
            self._nursery.kill(child.pid)

    async def _hire(self) -> None:
        for _ in range(_STARTS):
            await self.start()
            assert self._nursery is not None
            try:
                child = await self._nursery.fork(self._said, self._went)
            except ConnectionError:
                continue  # the nursery went in between: start() brings up another
            self.counts.started += 1
            self._idle.append(child)
            return
        raise WorkerLost("verifier", "pool", f"the judging process died {_STARTS} times before it could fork")

    def _hired(self, task: asyncio.Task[None]) -> None:
        self._hiring.discard(task)
        if self._closed or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
        else:
            self._pump()

    # --- what becomes of it ------------------------------------------------------------------------------------------

    def _said(self, child: Child, verdict: Verdict) -> None:
        work = self._busy.get(child)
        if work is None or not work.jobs:
            return  # of a job that was taken back
        job = work.jobs.popleft()
        self._mean = verdict.seconds if self._mean is None else 0.9 * self._mean + 0.1 * verdict.seconds
        work.since, work.held_up = time.perf_counter(), False
        self._finish(job, verdict)
        if work.jobs:
            if self._queue and 2 * len(work.jobs) <= self._ahead():
                self._feed(child, work)
            return
        self._stop_clock(work)
        if work.last:
            self._end(child)
        elif work.spare or not self._queue:
            self._rest(child)
        else:
            self._feed(child, _Work())
        self._pump()

    def _went(self, child: Child) -> None:
        """A child's socket closed: it died, or it was ended here and is in no table any more."""
        if child in self._idle:
            self._idle.remove(child)
            self.counts.deaths += 1
        work = self._busy.pop(child, None)
        if work is None or self._closed:
            return
        self.counts.deaths += 1
        self._stop_clock(work)
        job = work.jobs[0]
        job.deaths += 1
        if job.deaths > 1:
            work.jobs.popleft()
            self._finish(job, Verdict(None, error="the process that judged this answer died, twice"))
        self._take_back(work.jobs)
        self._pump()

    def _start_clock(self, child: Child, work: _Work) -> None:
        work.since, work.held_up = time.perf_counter(), False
        wait = min(_HELD_UP_SECONDS, self.timeout)
        work.timer = asyncio.get_running_loop().call_later(wait, self._look, child, work)

    def _stop_clock(self, work: _Work) -> None:
        if work.timer is not None:
            work.timer.cancel()
            work.timer = None

    def _look(self, child: Child, work: _Work) -> None:
        """One timer per busy child. The loop hands over what a socket holds before it looks at its timers, so a verdict
        that has arrived counts even when this process was late."""
        took = time.perf_counter() - work.since
        if took >= self.timeout:
            self._time_out(child, work, took)
            return
        if took >= _HELD_UP_SECONDS and not work.held_up:
            self._hold_up(work)
        left = (self.timeout if work.held_up else min(_HELD_UP_SECONDS, self.timeout)) - took
        work.timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._look, child, work)

    def _hold_up(self, work: _Work) -> None:
        work.held_up = True
        first = work.jobs.popleft()
        if work.jobs:
            work.last = True
            self._take_back(work.jobs)
            work.jobs.clear()
        work.jobs.append(first)
        if not work.spare and sum(one.spare for one in self._busy.values()) < self.spares:
            work.spare = True
        self._pump()

    def _time_out(self, child: Child, work: _Work, took: float) -> None:
        job = work.jobs.popleft()
        self.counts.timeouts += 1
        self._end(child)
        error = f"no verdict within {self.timeout:g} s"
        self._finish(job, Verdict(None, error=error, seconds=took, timed_out=True))
        self._take_back(work.jobs)
        self._pump()

    def _take_back(self, jobs: Iterable[_Job]) -> None:
        self._queue.extendleft(reversed(list(jobs)))

    def _finish(self, job: _Job, verdict: Verdict) -> None:
        call = job.call
        assert call.verdicts[job.index] is None, f"a second verdict on {job.item.id}"
        call.verdicts[job.index] = verdict
        call.left -= 1
        if not call.left and not call.done.done():
            call.done.set_result(None)
        self.counts.verdicts += 1
        slowest = self.counts.slowest
        if len(slowest) < 10 or verdict.seconds > slowest[-1][0]:
            slowest.append((verdict.seconds, job.item.id))
            slowest.sort(reverse=True)
            del slowest[10:]

    def _forget(self, call: _Call) -> None:
        """A call that nobody waits for any more: children that are at its jobs are ended, the rest is skipped."""
        call.cancelled = True
        for child, work in list(self._busy.items()):
            if work.jobs[0].call is call:
                self._stop_clock(work)
                self._end(child)
                self._take_back(work.jobs)
        self._queue = deque(job for job in self._queue if job.call is not call)
        self._pump()

    def _fail(self, error: BaseException) -> None:
        """No child can be had: whoever waits is told why."""
        waiting = {job.call for job in (*self._queue, *(job for work in self._busy.values() for job in work.jobs))}
        self._queue.clear()
        for call in waiting:
            call.cancelled = True
            if not call.done.done():
                call.done.set_exception(error)
