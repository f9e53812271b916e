"""How far a run is, read from its files alone, as one JSON object: where the files are, no cluster needed.

    python -m grpo_dist.launch.peek --launch OUT/.launch/NAME --run OUT/NAME

Run on this machine, over ssh or inside a pod; whoever asks shows the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_dist.launch.folder import attempts

SHOWN_METRICS = (
    "rollout/reward_mean",
    "rollout/correct_mean",
    "rollout/staleness_mean",
    "train/loss",
    "train/kl",
    "time/step",
)
_TAIL = 256 * 1024


def last_objects(path: Path, count: int) -> list[dict[str, Any]]:
    """The last complete JSON lines of a file that may be growing."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the first one may be cut
    return [one for one in found if isinstance(one, dict)][-count:]


def workers(run: Path) -> dict[str, dict[str, Any]]:
    """Worker name -> pid and node of its newest process, from every start that the events tell of."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = (run / "events.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        if "_started" not in line and "_replaced" not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if "worker" in event and "pid" in event:
            found[str(event["worker"])] = {"pid": event["pid"], "node": event.get("node")}
    return found


def progress(run: Path) -> dict[str, Any]:
    """Step, headline metrics, fleet wanted and live, last evaluation, last events, what is waited for."""
    metrics = last_objects(run / "metrics.jsonl", 1)
    newest = metrics[-1] if metrics else {}
    evals = last_objects(run / "evals.jsonl", 1)
    return {
        "run_dir": str(run),
        "step": newest.get("step", 0),
        "updated": newest.get("time"),
        "metrics": {key: newest[key] for key in SHOWN_METRICS if key in newest},
        "fleet": {key.removeprefix("fleet/"): value for key, value in newest.items() if key.startswith("fleet/")},
        "evaluation": evals[-1] if evals else None,
        "events": last_objects(run / "events.jsonl", 5),
        "workers": workers(run),
        "now": _object(run / "now.json"),
    }


def _object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def peek(launch: Path, run: Path) -> dict[str, Any]:
    """`progress` and what the nodes of the newest attempt said."""
    tries = attempts(launch)
    newest = tries[-1] if tries else None
    return {
        "now": time.time(),
        "attempt": int(newest.path.name.removeprefix("attempt-")) if newest else None,
        "cluster": newest.cluster() if newest else None,
        "nodes": list(newest.states().values()) if newest else [],
        "exit": newest.exit() if newest else None,
        "progress": progress(run),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.launch.peek")
    parser.add_argument("--launch", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    options = parser.parse_args(arguments)
    print(json.dumps(peek(options.launch, options.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
