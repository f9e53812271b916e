"""Where a step's seconds went: one clock, from the record of one step to the record of the next.

An evaluation or a save after a step is in the time of the step that follows, under its own name, so that the phases add
up and an idle fraction means what it says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from grpo_dist.rollout.pipeline import WindowTimes
from grpo_dist.types import WeightUpdate

PHASES = ("learn", "publish", "evaluate", "save")


class StepClock:
    """Seconds per phase of the current step."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._phases = dict.fromkeys(PHASES, 0.0)

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.monotonic() - self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] += time.monotonic() - began

    def metrics(self, window: WindowTimes, values: Mapping[str, float]) -> dict[str, float]:
        """time/* and the tokens per second of a step; ``values`` has its token counts."""
        whole, learn = max(self.seconds, 1e-9), self._phases["learn"]
        times = {
            "time/step": whole,
            "time/rollout_wait": window.rollout_wait,
            "time/verify_wait": window.verify_wait,
            "time/learn": learn,
            "time/publish": self._phases["publish"],
            "time/evaluate": self._phases["evaluate"],
            "time/save": self._phases["save"],
            "time/rollout_idle_fraction": 1 - min(1.0, window.generating / whole),
            "time/learner_idle_fraction": 1 - min(1.0, learn / whole),
            "train/tokens_per_second": values["train/tokens"] / max(learn, 1e-9),
        }
        if window.generating:
            times["rollout/tokens_per_second"] = values["rollout/completion_tokens"] / window.generating
        return times


def weight_metrics(sent: WeightUpdate) -> dict[str, float]:
    """weights/* of a publication."""
    values = {
        "weights/version": float(sent.version),
        "weights/seconds": sent.seconds,
        "weights/gather_seconds": sent.gather_seconds,
        "weights/send_seconds": sent.send_seconds,
        "weights/bytes": float(sent.bytes),
        "weights/pause_seconds": sent.pause_seconds,
    }
    return values if sent.checksum_ok is None else values | {"weights/checksum_ok": float(sent.checksum_ok)}
