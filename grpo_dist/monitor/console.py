"""What a person sees while a run goes on: a live display in a terminal, one line per step anywhere else.

    waiting("…")      what is being waited for, replaced in place      say("…")   a line that stays
    step(n, metrics)  the finished step                                evaluated(n, metrics)

Values come by the metric names of metrics.jsonl; a name that is missing is left out of the line. Nothing here decides
anything: a display that cannot be written to is given up, never an error of the run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from grpo_dist.config import Recipe

SPARK = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 40


class Console:
    """Progress of one run."""

    def __init__(
        self,
        name: str,
        total_steps: int,
        *,
        first_step: int = 0,
        live: bool | None = None,
        stream: IO[str] | None = None,
        note: Path | None = None,
    ) -> None:
        """Args: first_step: already done (a resumed run); live: by default, whether the stream is a terminal; note: a
        file that says what is being waited for now, for those who ask from elsewhere (`grpo-dist status`)."""
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._name, self._total, self._step = name, total_steps, first_step
        self._rewards: deque[float] = deque(maxlen=RECENT_STEPS)
        self._values: Mapping[str, float] = {}
        self._evaluation: str = ""
        self._phase, self._phase_since = "the start", time.monotonic()
        self._detail: Callable[[], str] | None = None
        self._note = note
        self._seconds: deque[float] = deque(maxlen=10)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._rich,
        )
        self._task = self._progress.add_task(name, total=total_steps, completed=first_step)
        is_live = self._rich.is_terminal if live is None else live
        self._live = (
            Live(get_renderable=self._render, console=self._rich, refresh_per_second=4, transient=True)
            if is_live
            else None
        )

    def __enter__(self) -> Console:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._live is not None:
            self._live.stop()

    # ---- what happens

    def waiting(self, text: str, detail: Callable[[], str] | None = None) -> None:
        """What is being waited for right now; ``detail`` is asked again at each repaint ("12 of 32 groups")."""
        self._detail = detail
        if text != self._phase:
            self._phase, self._phase_since = text, time.monotonic()
            self._write_note()

    def _write_note(self) -> None:
        if self._note is None:
            return
        aside = self._note.with_suffix(".part")
        try:
            aside.write_text(json.dumps({"waiting_for": self._phase, "since": time.time()}))
            aside.replace(self._note)
        except OSError:
            self._note = None  # a full disk is told by what has to be written

    def say(self, text: str) -> None:
        """A line that stays; one that starts with "warning" stands out."""
        self._rich.print(Text(text), style="bold yellow" if text.lower().startswith("warning") else None)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One finished step."""
        self._step, self._values = step, values
        if (reward := values.get("rollout/reward_mean")) is not None:
            self._rewards.append(reward)
        if (seconds := values.get("time/step")) is not None:
            self._seconds.append(seconds)
        self._progress.update(self._task, completed=step)
        if self._live is None:
            self.say(step_line(step, self._total, values, self._seconds))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """One finished evaluation."""
        single = values.get("eval/k") == 1  # then pass@k says the same again
        passes = {k: v for k, v in values.items() if k.startswith("eval/pass@") and not (single and k == "eval/pass@k")}
        shown = ", ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in passes.items())
        self._evaluation = f"after step {step}: {shown}" if shown else ""
        self.say(f"evaluation after step {step}: {shown or 'no verdicts'}")

    # ---- how it looks

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        for label, text in display_rows(self._values):
            table.add_row(label, text)
        if self._rewards:
            table.add_row("reward", f"{spark(self._rewards)}  {self._rewards[-1]:.3f}")
        if self._evaluation:
            table.add_row("evaluation", self._evaluation)
        waited = time.monotonic() - self._phase_since
        detail = self._detail() if self._detail is not None else ""
        parts = [
            f"waiting for {self._phase}",
            *([detail] if detail else []),
            *([f"{waited:.0f} s"] if waited >= 2 else []),
        ]
        table.add_row("now", ", ".join(parts))
        return Group(self._progress, table)


def open_console(recipe: Recipe, first_step: int = 0) -> Console:
    """The display of a run on standard output; a context manager."""
    return Console(recipe.run.name, recipe.run.steps, first_step=first_step, note=recipe.run_dir / "now.json")


def spark(values: deque[float] | list[float]) -> str:
    """A line of blocks between the lowest and highest value."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(SPARK[int((v - low) / width * (len(SPARK) - 1))] for v in values)


def display_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and text of the live table."""
    rows = []
    if (correct := values.get("rollout/correct_mean")) is not None:
        rows.append(("pass rate", f"{correct:.1%}"))
    if (rate := values.get("rollout/tokens_per_second")) is not None:
        learn = values.get("train/tokens_per_second")
        rows.append(("tokens/s", f"{rate:,.0f} rolled out" + (f", {learn:,.0f} trained" if learn else "")))
    if (mean := values.get("rollout/staleness_mean")) is not None:
        rows.append(("staleness", f"{mean:.2f} mean, {values.get('rollout/staleness_max', mean):.0f} max"))
    if (zero := values.get("rollout/zero_variance_fraction")) is not None:
        rows.append(("no spread", f"{zero:.0%} of groups"))
    if times := phase_times(values):
        rows.append(("last step", times))
    return rows


def phase_times(values: Mapping[str, float]) -> str:
    parts = [
        f"{label} {values[name]:.2f} s"
        for label, name in (
            ("rollout", "time/rollout_wait"),
            ("verify", "time/verify_wait"),
            ("learn", "time/learn"),
            ("publish", "time/publish"),
        )
        if name in values
    ]
    total = values.get("time/step")
    return (f"{total:.2f} s" if total is not None else "") + (f" ({', '.join(parts)})" if parts else "")


def step_line(step: int, total: int, values: Mapping[str, float], seconds: deque[float]) -> str:
    """One plain line per step."""
    parts = [f"step {step}/{total}"]
    if (reward := values.get("rollout/reward_mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (correct := values.get("rollout/correct_mean")) is not None:
        parts.append(f"correct {correct:.1%}")
    if (rate := values.get("rollout/tokens_per_second")) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if (stale := values.get("rollout/staleness_max")) is not None:
        parts.append(f"staleness {stale:.0f}")
    if (zero := values.get("rollout/zero_variance_fraction")) is not None:
        parts.append(f"no spread {zero:.0%}")
    if (loss := values.get("train/loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if times := phase_times(values):
        parts.append(times)
    if seconds and step < total:
        left = (total - step) * sum(seconds) / len(seconds)
        parts.append(f"left {left:.0f} s" if left < 120 else f"left {left / 60:.0f} min")
    return "  ".join(parts)
