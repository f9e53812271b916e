"""Signals that end a run: which they are, what the first and the second one do, and the exit status they lead to.

first one  ─► while workers start: the start is cancelled │ later: remembered; the loop saves and stops after its step
second one ─► the process leaves at once; Ray ends this job's workers
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_dist.errors import Interrupted

# What a scheduler sends ahead of taking the machine away asks to be requeued; the others are a person's.
STOP_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGUSR1: 85}


class StopSignals:
    """What has been asked of the run from outside."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._starting: asyncio.Task[Any] | None = None

    @contextmanager
    def heard(self, say: Callable[[str], None], saved: Callable[[], str]) -> Iterator[None]:
        """Handle the signals of STOP_SIGNALS while this is open.

        Args:
            saved: what is durable, for the message of a run that leaves at once.
        """
        loop = asyncio.get_running_loop()

        def asked(received: signal.Signals) -> None:
            if self.received is not None:
                say(f"{received.name} again: leaving now; {saved()}")
                sys.stdout.flush()
                os._exit(1)  # at once: no handler, no wait, and not the status of a clean save
            self.received = received
            if self._starting is not None:
                self._starting.cancel()
                return
            say(f"{received.name}: finishing the step at hand, then saving (again: leave at once)")

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, asked, number)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    @contextmanager
    def ending_a_start(self) -> Iterator[None]:
        """A signal inside ends the start of the workers: there is nothing to finish. Raises Interrupted."""
        self._starting = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.received is None:
                raise
            raise Interrupted(
                f"stopped by {self.received.name} while the workers were starting: nothing had to be saved",
                exit_code=STOP_SIGNALS[self.received],
            ) from None
        finally:
            self._starting = None
