"""Does the quickstart learn with each objective and each advantage? Short real runs, one after the other, one table.

    python -m benchmarks.objectives [--steps 15] [--staleness 0] [--seed 0] [--minutes 60] [--out FILE] [NAME …]

Every row is the shipped quickstart recipe with the settings of that row and nothing else changed: engine, verifier and
ZeRO-3 rank as Ray actors. Rows already in FILE (JSON lines) are not run again, so the table may be made in several
sittings; ``--minutes`` starts no run after that time. The table goes to standard error, as Markdown.

One run takes about a minute on a quiet core: not part of ``make bench``. Left out: whether one choice is better than
another (a few points of pass@1 between rows are noise: 256 held-out prompts, one sample each), and settings that act
off policy only (clip_high, clip_dual): with one update a step at staleness 0 such rows are equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CASES: dict[str, tuple[str, ...]] = {
    "clip": (),
    "gspo": (
        "algorithm.objective=gspo", "algorithm.divisor=sequence", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4",
    ),
    "sequence_ratio": ("algorithm.objective=sequence_ratio", "algorithm.divisor=sequence"),
    "cispo": ("algorithm.objective=cispo", "algorithm.clip_low=1"),
    "sapo": ("algorithm.objective=sapo",),
    "gmpo": (
        "algorithm.objective=gmpo", "algorithm.divisor=sequence", "algorithm.clip_low=0.4", "algorithm.clip_high=0.4",
    ),
    "reinforce": ("algorithm.objective=reinforce",),
    "dr_grpo": ("algorithm.advantage=dr_grpo", "algorithm.divisor=constant"),
    "rloo": ("algorithm.advantage=rloo",),
    "batch_std": ("algorithm.advantage=batch_std",),
    "reinforce_pp": ("algorithm.advantage=reinforce_pp",),
    "reinforce_pp_baseline": ("algorithm.advantage=reinforce_pp_baseline",),
    "maxrl": ("algorithm.advantage=maxrl",),
    "pass_at_k": ("algorithm.advantage=pass_at_k",),
}  # fmt: skip
LIMIT_SECONDS = 1000
LAST = 5  # training steps whose mean is shown


def run(name: str, settings: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """One quickstart of so many steps; what its run folder says of it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "grpo_dist.cli", "train", "quickstart", "run.name=case", f"run.out={out}",
            f"run.steps={options.steps}", f"run.seed={options.seed}", f"evaluate.every={options.steps}",
            f"rollout.max_staleness={options.staleness}", "tracking.wandb.mode=disabled", *settings,
        ]  # fmt: skip
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        rows, evaluations = (
            [json.loads(line) for line in (Path(out) / "case" / file).read_text().splitlines()]
            for file in ("metrics.jsonl", "evals.jsonl")
        )
    last = rows[-LAST:]

    def mean(metric: str) -> float:
        return round(statistics.fmean(row[metric] for row in last), 4)

    return {
        "case": name,
        "settings": list(settings),
        "steps": options.steps,
        "staleness": options.staleness,
        "seed": options.seed,
        "pass@1_before": evaluations[0]["eval/pass@1"],
        "pass@1_after": evaluations[-1]["eval/pass@1"],
        "reward_first": round(rows[0]["rollout/reward_mean"], 4),
        "reward_last": mean("rollout/reward_mean"),
        "tokens_last": mean("rollout/completion_tokens_mean"),
        "clip_fraction_last": mean("train/clip_fraction"),
        "ratio_max": max(row["train/ratio_max"] for row in rows),
        "grad_norm": round(statistics.median(row["train/grad_norm"] for row in rows), 4),
        "seconds": round(time.monotonic() - started, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| row | settings | pass@1 before | after | reward, first step | last {LAST} steps | clipped, last {LAST} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        settings = ", ".join(s.removeprefix("algorithm.").replace("=", ": ") for s in row["settings"]) or "as shipped"
        lines.append(
            f"| {row['case']} | {settings} | {row['pass@1_before']:.2f} | {row['pass@1_after']:.2f} "
            f"| {row['reward_first']:.2f} | {row['reward_last']:.2f} | {row['clip_fraction_last']:.1%} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 15), ("staleness", 0), ("seed", 0), ("minutes", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="Results so far; new ones are added.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(CASES)}; default: all")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in CASES]:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(CASES)}")
    kept = options.out.read_text().splitlines() if options.out and options.out.exists() else []
    done = {
        row["case"]: row
        for row in map(json.loads, kept)
        if (row["steps"], row["staleness"], row["seed"]) == (options.steps, options.staleness, options.seed)
    }
    until = time.monotonic() + 60 * options.minutes
    for name in options.names or CASES:
        if name in done or time.monotonic() > until:
            continue
        done[name] = row = run(name, CASES[name], options)
        print(f"{name}: {row['pass@1_before']:.3f} -> {row['pass@1_after']:.3f}", file=sys.stderr, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    found = [done[name] for name in CASES if name in done]
    print(table(found), file=sys.stderr)
    print(json.dumps({"benchmark": "objectives", "rows": found}))
    return found


if __name__ == "__main__":
    main()
