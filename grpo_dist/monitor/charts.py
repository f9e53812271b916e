"""Charts of a run, drawn by matplotlib from plain rows: the only plots of the package.

    rows of metrics.jsonl, evals.jsonl, events.jsonl ─► Chart (which lines) ─► SVG text, or a PNG file

A line without a value in any row is left out, a chart without a line too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Rows = Sequence[Mapping[str, Any]]

COLOURS = ("#2a6fbb", "#d1495b", "#2e8b57", "#e0a030", "#7a5ba6", "#5c6670")
STYLE: Any = {  # matplotlib types the names of its settings one by one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "axes.edgecolor": "#9aa3ad",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric by name; ``marks`` draws points joined by a line (evaluations)."""

    metric: str
    label: str
    marks: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    note: str = ""
    stacked: bool = False
    log: bool = False
    floor_zero: bool = True
    equal_once: bool = False  # lines with the same values are drawn once, under the first name


CHARTS = (
    Chart(
        "Reward",
        (
            Line("rollout/reward_mean", "mean reward of the rollouts"),
            Line("rollout/correct_mean", "correct"),
            Line("eval/pass@1", "pass@1 on held-out prompts", marks=True),
        ),
        note="Rollouts are sampled for training; held-out prompts are never trained on.",
        equal_once=True,  # with one verifier of weight 1, reward and correct are one
    ),
    Chart(
        "Completion length",
        (Line("rollout/completion_tokens_mean", "mean"), Line("rollout/completion_tokens_max", "longest")),
        unit="tokens",
    ),
    Chart(
        "Groups and completions that teach little",
        (
            Line("rollout/zero_variance_fraction", "groups whose rewards are all equal"),
            Line("rollout/truncated_fraction", "completions cut off at max_tokens"),
        ),
        unit="share",
        note="A group of equal rewards has advantage 0: it costs time and trains nothing.",
    ),
    Chart(
        "Time of a step",
        (
            Line("time/rollout_wait", "waiting for rollouts"),
            Line("time/verify_wait", "waiting for verdicts"),
            Line("time/learn", "learning"),
            Line("time/publish", "publishing weights"),
        ),
        unit="seconds",
        stacked=True,
    ),
    Chart(
        "Tokens per second",
        (Line("rollout/tokens_per_second", "rolled out"), Line("train/tokens_per_second", "trained")),
        unit="tokens/s",
    ),
    Chart(
        "Staleness",
        (Line("rollout/staleness_mean", "mean"), Line("rollout/staleness_max", "most")),
        unit="versions",
        note="How many weight versions a trained token is behind the learner; never more than max_staleness.",
    ),
    Chart("Loss", (Line("train/loss", "loss"), Line("train/policy_loss", "policy part")), floor_zero=False),
    Chart("Gradient norm", (Line("train/grad_norm", "before clipping"),)),
    Chart(
        "Policy",
        (
            Line("train/entropy", "entropy"),
            Line("train/kl", "KL to the reference"),
            Line("train/clip_fraction", "clipped"),
        ),
        unit="nats, share",
    ),
    Chart(
        "Engine against learner",
        (
            Line("mismatch/logprob_abs_mean", "mean difference of log-probabilities"),
            Line("mismatch/logprob_abs_max", "largest"),
            Line("mismatch/kl", "KL"),
        ),
        unit="nats",
        log=True,
        note="The same tokens under vLLM and under the learner; large values mean stale or wrong weights.",
    ),
    Chart(
        "Publication",
        (Line("weights/seconds", "whole"), Line("weights/pause_seconds", "engines paused")),
        unit="seconds",
    ),
    Chart(
        "Idle",
        (Line("time/rollout_idle_fraction", "engines"), Line("time/learner_idle_fraction", "learner")),
        unit="share",
    ),
    Chart(
        "Fleet",
        (
            Line("fleet/rollout_live", "engines"),
            Line("fleet/verifier_live", "verifier actors"),
            Line("fleet/learner_ranks", "learner ranks"),
        ),
        unit="live",
    ),
)  # fmt: skip

PICTURE = ("Reward", "Completion length", "Time of a step")


def reward_parts(metrics: Rows) -> Chart | None:
    """The parts of the reward, when there is more than one."""
    names = sorted({k for row in metrics for k in row if k.startswith("reward/") and k.endswith("_mean")})
    if len(names) < 2:
        return None
    lines = tuple(Line(name, name.removeprefix("reward/").removesuffix("_mean")) for name in names[: len(COLOURS)])
    return Chart("Parts of the reward", lines, floor_zero=False)


def points(rows: Rows, metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have the metric."""
    found = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None and "step" in row]
    return [float(step) for step, _ in found], [float(value) for _, value in found]


def has_values(chart: Chart, rows: Rows) -> bool:
    return any(points(rows, line.metric)[0] for line in chart.lines)


def draw(axes: Axes, chart: Chart, rows: Rows) -> None:
    """One chart onto axes."""
    axes.set_title(chart.title)
    axes.set_xlabel("step")
    axes.set_ylabel(chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    lines = [(line, *points(rows, line.metric)) for line in chart.lines]
    drawn = [line[1:] for line in lines] if chart.equal_once else []
    lines = [found for i, found in enumerate(lines) if found[1] and found[1:] not in drawn[:i]]
    if chart.stacked:
        _stack(axes, lines)
    else:
        for (line, steps, values), colour in zip(lines, COLOURS, strict=False):
            few = "o" if line.marks or len(steps) == 1 else ""
            axes.plot(steps, values, label=line.label, color=colour, linewidth=1.6, marker=few, markersize=4)
    if chart.log and any(v > 0 for _, _, values in lines for v in values):
        axes.set_yscale("log")
    elif chart.floor_zero and not chart.stacked:
        low, high = axes.get_ylim()
        flat = not any(v for _, _, values in lines for v in values)
        axes.set_ylim(min(0.0, low) if not flat else 0.0, high if not flat else 1.0)
    if chart.stacked:
        axes.grid(axis="x", visible=False)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.3)  # room for the legend
        axes.legend(fontsize=8, ncols=2, loc="upper left")
    elif len(lines) > 1:
        axes.legend(fontsize=8)


def _stack(axes: Axes, lines: Sequence[tuple[Line, list[float], list[float]]]) -> None:
    steps = sorted({step for _, found, _ in lines for step in found})
    below = [0.0] * len(steps)
    for (line, found, values), colour in zip(lines, COLOURS, strict=False):
        by_step = dict(zip(found, values, strict=True))
        heights = [by_step.get(step, 0.0) for step in steps]
        axes.bar(steps, heights, bottom=below, label=line.label, color=colour, width=0.85)
        below = [b + h for b, h in zip(below, heights, strict=True)]


def svg(chart: Chart, rows: Rows) -> str:
    """The chart as SVG text for an HTML page."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": chart.title}):  # the salt keeps ids apart on one page
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        draw(figure.subplots(), chart, rows)
        return _as_svg(figure)


def timeline_svg(events: Rows) -> str:
    """What happened when: one row per kind of event."""
    began = min(float(event["time"]) for event in events)
    kinds: dict[str, list[float]] = {}
    for event in events:
        kinds.setdefault(str(event["kind"]), []).append((float(event["time"]) - began) / 60)
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "timeline"}):
        figure = Figure(figsize=(11, 0.8 + 0.28 * len(kinds)), layout="constrained")
        axes = figure.subplots()
        for place, (kind, minutes) in enumerate(kinds.items()):
            bad = any(word in kind for word in ("lost", "failed", "refused", "dropped", "warning"))
            axes.scatter(minutes, [place] * len(minutes), s=22, color=COLOURS[1] if bad else COLOURS[0], zorder=3)
        axes.set_yticks(range(len(kinds)), list(kinds))
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_xlabel("minutes")
        return _as_svg(figure)


def picture(file: Path, rows: Rows, title: str) -> None:
    """The README's picture: a few charts side by side."""
    charts = [chart for chart in CHARTS if chart.title in PICTURE and has_values(chart, rows)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(charts), 3.2), layout="constrained", dpi=110)
        figure.suptitle(title, fontsize=11)
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            draw(axes, chart, rows)
        figure.savefig(file, format="png", metadata={"Software": None})


def _as_svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
