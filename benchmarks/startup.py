"""Seconds from the command to the first update of the quickstart, phase by phase, and the memory of every process then.

    python -m benchmarks.startup

The policy is built before the clock starts. Phases are read from the run folder's own events.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_dist.quickstart.policy import build_quickstart_policy

MARK = "GRPO_DIST_BENCH"
LIMIT_SECONDS = 600
ROLES = (
    ("RolloutWorker", "rollout worker (actor)"), ("EngineCore", "engine core"), ("VLLM::Worker", "engine worker"),
    ("LearnerRank", "learner rank"), ("VerifierWorker", "verifier worker (actor)"),
    ("grpo_dist.verifiers", "verifier child"), ("gcs_server", "Ray: head"), ("raylet/raylet", "Ray: node"),
    ("wandb", "tracker"), ("grpo_dist.cli", "driver"),
)  # fmt: skip


def role_of(command_line: str) -> str:
    return next((role for word, role in ROLES if word in command_line), "Ray: agents, idle workers")


def resident_megabytes(mark: str) -> dict[str, float]:
    """Proportional set size by role: shared pages are split over the processes that share them."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            command_line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines = (entry / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        role = role_of(command_line)
        found[role] = found.get(role, 0.0) + kilobytes / 1024
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure() -> dict[str, Any]:
    build_quickstart_policy()
    with tempfile.TemporaryDirectory() as out:
        run_dir, mark = Path(out) / "startup", str(os.getpid())
        began, wall = time.monotonic(), time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_dist.cli", "train", "quickstart", "run.name=startup", f"run.out={out}",
             "run.steps=20", "evaluate.every=0", "tracking.wandb.mode=disabled"],
            env=os.environ | {MARK: mark}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not (run_dir / "metrics.jsonl").exists():
                if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                    raise RuntimeError(f"the quickstart made no step (exit status {process.poll()})")
                time.sleep(0.05)
            seconds = time.monotonic() - began
            memory = resident_megabytes(mark)
        finally:
            process.terminate()
            process.wait(120)
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        phases = {
            f"{e['kind']} {e.get('worker', '')}".strip(): e["time"] - wall for e in events if e["time"] < wall + seconds
        }
        return {"benchmark": "startup", "seconds_to_first_update": seconds, "phases": phases, "megabytes": memory}


def show(result: dict[str, Any]) -> None:
    table = Table(title="quickstart: from the command to the first update")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, seconds in result["phases"].items():
        table.add_row(name, f"{seconds:.1f} s")
    table.add_row("first update recorded", f"{result['seconds_to_first_update']:.1f} s", end_section=True)
    for role, megabytes in result["megabytes"].items():
        table.add_row(role, f"{megabytes:,.0f} MB")
    Console(stderr=True).print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    result = measure()
    show(result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
