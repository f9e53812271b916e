"""What a finished quickstart run has shown, in a few honest words, from its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.monitor.records import read_jsonl

SKILL = (
    "The policy came with two habits: guessing the sum, and working it out step by step. The skill of adding was "
    "already there from the warm-up; GRPO chose between the habits, it did not teach arithmetic."
)


def closing_words(run_dir: Path) -> str:
    """Numbers before and after, and what they mean."""
    lines = []
    passed = _first_and_last(run_dir / "evals.jsonl", "eval/pass@1")
    if passed is not None:
        lines.append(f"pass@1 on held-out prompts: {passed[0]:.3f} before, {passed[1]:.3f} after")
    length = _first_and_last(run_dir / "metrics.jsonl", "rollout/completion_tokens_mean")
    if length is not None:
        lines.append(f"tokens per completion: {length[0]:.1f} at first, {length[1]:.1f} at the end")
    return "\n".join([*lines, SKILL])


def _first_and_last(file: Path, metric: str) -> tuple[float, float] | None:
    values: list[Any] = [row[metric] for row in read_jsonl(file) if row.get(metric) is not None]
    return (float(values[0]), float(values[-1])) if values else None
