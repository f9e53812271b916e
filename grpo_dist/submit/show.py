"""`grpo-dist status` as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.submit.records import JobState, Record

# What fleet/* metrics call the living and the wanted workers of a role.
_FLEET = (
    ("rollout", "rollout_live", "rollout_wanted"),
    ("verifier", "verifier_live", "verifier_wanted"),
    ("learner", "learner_ranks", "learner_wanted"),
)


def status_lines(record: Record, state: JobState, files: Mapping[str, Any] | None) -> Iterator[str]:
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    yield f"{record.run}: {state.phase}{code}" + (f" ({state.detail})" if state.detail else "")
    yield f"  {record.backend} job {record.job}, run folder {record.run_dir}"
    if files is None:
        yield "  the run's files cannot be read from here"
        return
    progress = files["progress"]
    if progress["updated"]:
        age = f", {max(0, files['now'] - progress['updated']):.0f} s ago" if not state.ended else ""
        metrics = ", ".join(f"{key.split('/')[-1]} {value:.4g}" for key, value in progress["metrics"].items())
        yield f"  step {progress['step']}{age}: {metrics}"
    elif not state.ended:
        yield "  no step finished yet"
    if (now := progress.get("now")) and state.phase == "running":
        yield f"  waiting for {now['waiting_for']}, {max(0, files['now'] - now['since']):.0f} s"
    fleet = progress["fleet"]
    sizes = [
        f"{role} {fleet[live]:g}" + (f" of {fleet[wanted]:g}" if wanted in fleet else "")
        for role, live, wanted in _FLEET
        if live in fleet
    ]
    if sizes:
        yield f"  fleet: {', '.join(sizes)}"
    places: dict[str, list[str]] = {}
    for name, where in sorted(progress["workers"].items()):
        places.setdefault(str(where.get("node") or "?"), []).append(name)
    for node, names in sorted(places.items()) if not state.ended else []:
        yield f"  node {node}: {', '.join(names)}"
    waiting = [node for node in files["nodes"] if node["state"] not in ("joined", "running", "starting")]
    for node in waiting if not state.ended else []:
        yield f"  node {node['name']} ({node['host']}): {node['state']} {node['detail']}".rstrip()
    if progress["evaluation"]:
        shown = {
            k: v for k, v in progress["evaluation"].items() if k.startswith("eval/") and isinstance(v, int | float)
        }
        yield f"  evaluation at step {progress['evaluation'].get('step')}: " + ", ".join(
            f"{k} {v:.4g}" for k, v in shown.items()
        )
    for event in progress["events"][-3:]:
        rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "kind"))
        yield f"  event {event.get('kind')}: {rest}"[:200]
