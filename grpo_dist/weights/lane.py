"""A daemon thread that runs calls one after another and can be left behind.

Sending weights blocks inside libraries that cannot be interrupted. Whoever waits does so on a future with a limit; the
thread, being a daemon, keeps no process alive. One lane serves a group for its whole life: NCCL streams and the current
device are per thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*args)))
        return future

    def close(self) -> None:
        """Let the thread end after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)
            del item, future, call  # do not keep the last call's tensors alive while idle


def aside(name: str, call: Callable[..., T], *args: Any) -> Future[T]:
    """Run one call on a daemon thread of its own."""
    lane = Lane(name)
    future = lane.submit(call, *args)
    lane.close()
    return future
