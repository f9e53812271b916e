"""report.html: one self-contained page about a run, made from its run folder alone.

    metrics, evals, events, rollouts, recipe ─► numbers, charts, samples, time line ─► one HTML file, nothing fetched

Works on a run that is still going, was killed, or never finished a step. Text of prompts and completions is shown
escaped: it is a model's output, not ours.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.monitor.charts import CHARTS, Chart, Rows, has_values, picture, reward_parts, svg, timeline_svg
from grpo_dist.monitor.records import RunFolder, read_jsonl
from grpo_dist.recipe_file import dump_recipe

GROUPS_SHOWN = 3  # of each step that is shown
SAMPLES_SHOWN = 6  # of each group
TEXT_SHOWN = 2000  # characters of a text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2329; background: #fff; margin: 2rem auto; max-width: 1180px;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.sub, .note { color: #5c6670; } .note { font-size: .85rem; margin: 0 0 .5rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.tile { border: 1px solid #dfe3e8; border-radius: 8px; padding: .6rem .9rem; min-width: 8.5rem; }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1rem; }
.charts figure, .wide { margin: 0; border: 1px solid #dfe3e8; border-radius: 8px; padding: .6rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; } th, td { text-align: left; vertical-align: top;
       border-bottom: 1px solid #e6e8eb; padding: .3rem .5rem; } td.n { text-align: right; white-space: nowrap; }
pre { white-space: pre-wrap; word-break: break-word; margin: 0; font: .82rem/1.4 ui-monospace, monospace; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.good { color: #2e8b57; } .bad { color: #d1495b; }
"""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run; by default to report.html in its folder.

    Raises:
        UserError: no run there, or the file cannot be written.
    """
    target = out or run_dir / "report.html"
    text = report_html(RunFolder.read(run_dir))
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)
    except OSError as error:
        raise UserError(f"report {target} cannot be written: {error.strerror}") from error
    return target


def write_picture(run_dir: Path, file: Path) -> Path:
    """Write the README's picture of a run as PNG.

    Raises:
        UserError: no run there, nothing to draw, or the file cannot be written.
    """
    folder = RunFolder.read(run_dir)
    rows = _step_rows(folder)
    if not rows:
        raise UserError(f"{run_dir}: no step has finished, there is nothing to draw")
    recipe = folder.recipe()
    try:
        picture(file, rows, f"{recipe.run.name}: {recipe.description}" if recipe.description else recipe.run.name)
    except OSError as error:
        raise UserError(f"picture {file} cannot be written: {error.strerror}") from error
    return file


def report_html(folder: RunFolder) -> str:
    """The whole page."""
    recipe = folder.recipe()
    metrics, evals = list(read_jsonl(folder.path / "metrics.jsonl")), list(read_jsonl(folder.path / "evals.jsonl"))
    events = list(read_jsonl(folder.path / "events.jsonl"))
    rows = [*metrics, *evals]
    charts: list[Chart] = [chart for chart in CHARTS if has_values(chart, rows)]
    if (parts := reward_parts(metrics)) is not None:
        charts.insert(1, parts)
    sections = [
        f"<h1>{_text(recipe.run.name)}</h1><p class=sub>{_text(recipe.description)}</p>",
        _tiles(recipe.run.steps, metrics, evals, events),
        _charts(charts, rows) if charts else "<p>No step has finished yet.</p>",
        _events(events),
        _samples(folder, metrics),
        _last_metrics(metrics),
        f"<h2>Recipe</h2><details><summary>recipe.yaml</summary><pre>{_text(dump_recipe(recipe), whole=True)}</pre>"
        "</details>",
        f"<p class=note>Made from {_text(str(folder.path))} on {time.strftime('%Y-%m-%d %H:%M:%S')}.</p>",
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{_text(recipe.run.name)}</title>"
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _step_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [*read_jsonl(folder.path / "metrics.jsonl"), *read_jsonl(folder.path / "evals.jsonl")]


def _tiles(steps: int, metrics: Rows, evals: Rows, events: Rows) -> str:
    tiles = [("steps", f"{metrics[-1]['step'] if metrics else 0} of {steps}")]
    for label, rows, metric in (("reward", metrics, "rollout/reward_mean"), ("pass@1, held out", evals, "eval/pass@1")):
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if values:
            tiles.append((label, f"{values[0]:.3f} → {values[-1]:.3f}"))
    seconds = [row["time/step"] for row in metrics if row.get("time/step") is not None]
    if seconds:
        tiles.append(("a step, median", f"{sorted(seconds)[len(seconds) // 2]:.2f} s"))
    times = [float(row["time"]) for row in [*metrics, *evals, *events] if "time" in row]
    if times:
        tiles.append(("from first to last record", _duration(max(times) - min(times))))
    if trained := sum(row.get("train/tokens") or 0 for row in metrics):
        tiles.append(("tokens trained", f"{trained:,.0f}"))
    lost = sum(1 for event in events if str(event.get("kind", "")).endswith("_lost"))
    tiles.append(("workers lost", str(lost)))
    return (
        "<div class=tiles>"
        + "".join(f"<div class=tile><span class=sub>{_text(k)}</span><b>{_text(v)}</b></div>" for k, v in tiles)
        + "</div>"
    )


def _charts(charts: Sequence[Chart], rows: Rows) -> str:
    figures = "".join(f"<figure>{svg(c, rows)}<p class=note>{_text(c.note)}</p></figure>" for c in charts)
    return f"<h2>Curves</h2><div class=charts>{figures}</div>"


def _events(events: Rows) -> str:
    if not events:
        return ""
    began = min(float(event["time"]) for event in events)
    body = "".join(
        f"<tr><td class=n>{float(event['time']) - began:.1f} s</td><td>{_text(str(event['kind']))}</td><td>"
        + _text(", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "kind")))
        + "</td></tr>"
        for event in events
    )
    return (
        f"<h2>Time line</h2><div class=wide>{timeline_svg(events)}</div>"
        f"<details><summary>{len(events)} events</summary>"
        f"<table><tr><th>after<th>what<th>details</tr>{body}</table></details>"
    )


def _samples(folder: RunFolder, metrics: Rows) -> str:
    """Groups of the first, the middle and the last step, whole: the repeated prompt is the group."""
    steps = sorted({int(row["step"]) for row in metrics if folder.rollout_file(int(row["step"])).exists()})
    if not steps:
        return ""
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    parts = [
        "<h2>Completions</h2><p class=note>Samples of one group answer the same prompt; the advantage compares them "
        "with each other.</p>"
    ]
    for step in shown:
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for row in read_jsonl(folder.rollout_file(step)):
            groups.setdefault(int(row["group_id"]), []).append(row)
        tables = "".join(_group(groups[group_id]) for group_id in sorted(groups)[:GROUPS_SHOWN])
        is_open = " open" if step == shown[-1] else ""
        parts.append(f"<details{is_open}><summary>step {step}</summary>{tables}</details>")
    return "".join(parts)


def _group(rows: Sequence[Mapping[str, Any]]) -> str:
    body = "".join(
        f"<tr><td class=n>{row['index']}</td><td><pre>{_text(str(row['completion']))}</pre></td>"
        f"<td class='n {_verdict_class(row)}'>{_number(row['reward'])}</td><td class=n>{_number(row['advantage'])}</td>"
        f"<td class=n>{row['completion_tokens']}</td><td>{_text(str(row['finish_reason']))}</td>"
        f"<td>{'trained' if row['trained'] else _text(str(row['dropped'] or row['error'] or 'not trained'))}</td></tr>"
        for row in rows[:SAMPLES_SHOWN]
    )
    first = rows[0]
    more = f" <span class=sub>({len(rows)} samples, {SAMPLES_SHOWN} shown)</span>" if len(rows) > SAMPLES_SHOWN else ""
    return (
        f"<h3>group {first['group_id']}{more}</h3><pre>{_text(str(first['prompt']))}</pre>"
        f"<p class=note>answer: {_text(str(first['answer']))}</p>"
        f"<table><tr><th>#<th>completion<th>reward<th>advantage<th>tokens<th>end<th></tr>{body}</table>"
    )


def _verdict_class(row: Mapping[str, Any]) -> str:
    return {True: "good", False: "bad"}.get(row.get("correct"), "")  # type: ignore[arg-type]


def _last_metrics(metrics: Rows) -> str:
    if not metrics:
        return ""
    last = metrics[-1]
    body = "".join(
        f"<tr><td>{_text(name)}</td><td class=n>{_number(value)}</td></tr>"
        for name, value in last.items()
        if name != "time"
    )
    return f"<h2>All metrics</h2><details><summary>step {last['step']}</summary><table>{body}</table></details>"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, int | float) else _text(str(value))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _text(text: str, *, whole: bool = False) -> str:
    if len(text) > TEXT_SHOWN and not whole:
        text = text[:TEXT_SHOWN] + f" … ({len(text) - TEXT_SHOWN} more characters)"
    return html.escape(text.encode("utf-8", "replace").decode())
