"""Whole runs for tests: a tiny model on sums, in this process or as the command, and how to read what they leave."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import Recipe
from tests.conftest import tiny_recipe

MARK = "GRPO_DIST_TEST_MARK"


def write_rows(file: Path, rows: int = 40, seed: int = 0) -> Path:
    """Sums of two digits, one row each. A random model is right by chance only; its rewards still differ."""
    rng = random.Random(seed)
    lines = []
    for row in range(rows):
        a, b = rng.randrange(10), rng.randrange(10)
        lines.append(json.dumps({"id": f"row-{row}", "prompt": f"{a}+{b}=", "answer": str((a + b) % 10)}))
    file.write_text("\n".join(lines) + "\n")
    return file


def recipe_for(out: Path, model: Path, **sections: dict[str, Any]) -> Recipe:
    """A recipe that any random model gets uneven rewards from (how many characters of the answer it says)."""
    data = out / "rows.jsonl"
    if not data.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_rows(data)
    base: dict[str, dict[str, Any]] = {
        "run": {"out": str(out), "steps": 3},
        "model": {"path": str(model)},
        "data": {"source": str(data), "columns": {"id": "id"}},
        "rollout": {"group_size": 4, "groups_per_step": 4, "sampling": {"max_tokens": 12}},
        "verifiers": {"use": [{"name": "regex", "pattern": r"\d.*\d", "match": "search"}]},
        "learner": {"learning_rate": 1e-3, "micro_batch_tokens": 128},
        "checkpoint": {"every": 0},
    }
    for name, keys in sections.items():
        base.setdefault(name, {}).update(keys)
    return Recipe.model_validate(tiny_recipe(**base))


def write_recipe(file: Path, recipe: Recipe) -> Path:
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    return file


def jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def metrics(run: Path) -> list[dict[str, Any]]:
    return jsonl(run / "metrics.jsonl")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in jsonl(run / "events.jsonl") if e["kind"] == kind]


def rollouts(run: Path) -> list[list[dict[str, Any]]]:
    """Per step, the samples without what depends on the clock or on which worker did it."""
    clock = {"seconds", "engine", "verify_seconds"}
    return [
        [{k: v for k, v in row.items() if k not in clock} for row in jsonl(file)]
        for file in sorted((run / "rollouts").glob("*.jsonl"))
    ]


@contextmanager
def command(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Iterator[Command]:
    """``grpo-dist ARGUMENTS`` in a session of its own. Whatever of it lives at the end is killed, by id."""
    mark = uuid.uuid4().hex
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", **(env or {})}
    log = cwd / f"command-{mark[:6]}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_dist.cli", *arguments],
            cwd=cwd, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started = Command(process, mark, log)
        try:
            yield started
        finally:
            for pid in started.living():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(30)


class Command:
    """A started command and every process that came from it, known by a mark in the environment."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.process, self.mark, self.log = process, mark, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output[-3000:]}") from None

    def until(self, seen: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something that the run does. A run that ends first, or never does it, fails the test."""
        deadline = time.monotonic() + seconds
        while not seen():
            status = self.process.poll()
            assert status is None, f"ended ({status}) before {what}:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output[-3000:]}"
            time.sleep(0.02)

    def living(self) -> list[int]:
        """Processes that carry the mark: driver, Ray, workers, engines, tracker."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if needle in (entry / "environ").read_bytes() and "State:\tZ" not in (entry / "status").read_text():
                        found.append(int(entry.name))
                except (OSError, ProcessLookupError):
                    continue
        return found

    def nothing_left(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while left := self.living():
            if time.monotonic() > deadline:
                names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:120] for pid in left}
                raise AssertionError(f"left behind after {seconds} s: {names}")
            time.sleep(0.2)
