"""The recipe smollm2 against TRL's GRPOTrainer with its own generation: samples per second, in turns, in one run.

    python -m benchmarks.peers [--turns 2] [--steps 2] [--warm 1] [--peer-dtype bfloat16]     # or: make bench-peers

Both train the same model in a step of 8 prompts x 8 samples of up to 64 new tokens, on the same prompts in the same
order, with the same seed, sampling, verifier, clipping and rates, on all cores. A turn
is a process of its own (ours: ``grpo-dist train smollm2``), never two at once; its first step (``--warm``) is not
counted. The samples themselves differ: the two draw with different generators. Ours ends each step with the new weights
in the engine, which is in its time; TRL generates with the weights it trains.

Beside the time on the wall stands the CPU time of all processes of a step: on a machine that does other things, too, it
is the one to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_dist.config import Recipe
from grpo_dist.model_folder import load_inputs
from grpo_dist.recipe_file import load_recipe

MARK = "GRPO_DIST_BENCH"
PARTS = ("generate", "verify", "learn", "publish")
LIMIT_SECONDS = 1200
TARGET = 3.0
CORES = len(os.sched_getaffinity(0))
QUIET = ("evaluate.every=0", "data.evaluation.size=0", "checkpoint.every=0", "tracking.wandb.mode=disabled")


def settings(steps: int) -> list[str]:
    # TRL trains on groups without spread, too: the same work for both.
    same = "algorithm.filters.zero_variance=keep"
    # An engine's scheduler keeps a core of its own busy: with as many threads as cores, both wait for each other.
    threads = [f"rollout.threads={max(1, CORES - 1)}", f"learner.threads={CORES}"]
    return [*QUIET, same, f"run.steps={steps}", *threads]


def ours(folder: Path, steps: int) -> list[dict[str, float]]:
    """Steps of ``grpo-dist train smollm2``, as its run folder tells them."""
    command = [sys.executable, "-m", "grpo_dist.cli", "train", "smollm2", f"run.out={folder}", *settings(steps)]
    clock = CpuClock()
    with clock:
        _run(command, folder)
    rows = [json.loads(line) for line in (folder / "smollm2" / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "seconds": row["time/step"], "generate": row["time/rollout_wait"], "verify": row["time/verify_wait"],
            "learn": row["time/learn"], "publish": row["time/publish"], "tokens": row["rollout/completion_tokens"],
            "reward": row["rollout/reward_mean"],
            "cpu": clock.at(row["time"]) - clock.at(row["time"] - row["time/step"]),
        }
        for row in rows
    ]  # fmt: skip


class CpuClock:
    """CPU seconds of this process's descendants by the mark in their environment, sampled while the block runs."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # (unix time, CPU seconds)
        self._seen: dict[int, float] = {}  # also of those that have ended
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        os.environ[MARK] = str(os.getpid())
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        del os.environ[MARK]

    def at(self, moment: float) -> float:
        """CPU seconds spent until then."""
        return next((cpu for at, cpu in reversed(self._samples) if at <= moment), 0.0)

    def _watch(self) -> None:
        mark, mine = f"{MARK}={os.getpid()}".encode(), os.getpid()
        while not self._done.wait(0.3):
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and int(entry.name) != mine and mark in (entry / "environ").read_bytes():
                        fields = (entry / "stat").read_text().rpartition(")")[2].split()
                        self._seen[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                except OSError:
                    continue  # ended meanwhile
            self._samples.append((time.time(), sum(self._seen.values())))


def theirs(folder: Path, steps: int, recipe: Recipe, dtype: str, batch: int) -> list[dict[str, float]]:
    """Steps of TRL's trainer on the prompts that ours gets."""
    model, stream = load_inputs(recipe)
    rollout, learner = recipe.rollout, recipe.learner
    prompts = [stream.request(g).prompt for g in range(steps * rollout.groups_per_step)]
    job = {
        "out": str(folder), "model": model, "dtype": dtype, "threads": CORES, "seed": recipe.run.seed, "steps": steps,
        "batch": batch, "groups": rollout.groups_per_step, "group_size": rollout.group_size,
        "max_tokens": rollout.sampling.max_tokens, "temperature": rollout.sampling.temperature,
        "learning_rate": learner.learning_rate, "beta2": learner.optimizer.beta2, "grad_clip": learner.grad_clip,
        "verifiers": [use.model_dump(mode="json") for use in recipe.verifiers.use],
        "prompts": [{"id": p.id, "prompt": p.text, "answer": p.answer, "extra": p.extra} for p in prompts],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    text = _run([sys.executable, "-m", "benchmarks._trl", str(folder / "job.json")], folder)
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]


def _run(command: list[str], folder: Path) -> str:
    """Standard output of a turn. A turn that fails shows the end of what it wrote."""
    # Ray starts its workers with a niceness of 15: on a machine that does anything else, an unfair handicap.
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=Path(__file__).parents[1]
    )
    (folder / "turn.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        end = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{' '.join(command[:5])} ended with {done.returncode}:\n{end}")
    return done.stdout


def measure(turns: int, steps: int, warm: int, dtype: str, batch: int) -> dict[str, Any]:
    recipe = load_recipe("smollm2", settings(warm + steps))
    samples = recipe.rollout.groups_per_step * recipe.rollout.group_size
    rows: dict[str, list[dict[str, float]]] = {"trl": [], "grpo_dist": []}
    for turn in range(turns):
        for name in ("trl", "grpo_dist") if turn % 2 == 0 else ("grpo_dist", "trl"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                if name == "grpo_dist":
                    made = ours(folder, warm + steps)
                else:
                    made = theirs(folder, warm + steps, recipe, dtype, batch)
            rows[name] += made[warm:]
            seconds = [round(r["seconds"], 1) for r in made]
            print(f"turn {turn + 1} of {turns}, {name}: {seconds} s a step", file=sys.stderr, flush=True)
    out: dict[str, Any] = {
        "benchmark": "peers", "cores": CORES, "turns": turns, "warm": warm, "steps_per_turn": steps,
        "samples_per_step": samples,
        "dtype": {"grpo_dist": recipe.model.dtype, "trl": dtype}, "trl_batch": batch,
    }  # fmt: skip
    for name, made in rows.items():
        seconds = statistics.median(r["seconds"] for r in made)
        out[name] = {
            "samples_per_second": round(samples / seconds, 3), "seconds_per_step": round(seconds, 2),
            "cpu_seconds_per_step": round(statistics.median(r["cpu"] for r in made), 1),
            "seconds_by_step": [round(r["seconds"], 2) for r in made],
            "tokens_per_step": round(statistics.mean(r["tokens"] for r in made), 1),
            "reward": round(statistics.mean(r["reward"] for r in made), 3),
            "split": {p: round(statistics.median(r.get(p, 0.0) for r in made), 2) for p in PARTS},
        }  # fmt: skip
    out["ratio"] = round(out["grpo_dist"]["samples_per_second"] / out["trl"]["samples_per_second"], 2)
    out["cpu_ratio"] = round(out["trl"]["cpu_seconds_per_step"] / out["grpo_dist"]["cpu_seconds_per_step"], 2)
    out["target"] = TARGET
    return out


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"SmolLM2-135M, {result['samples_per_step']} samples a step, {result['cores']} cores")
    for column in ("", "samples/s", "s a step", *PARTS, "CPU s a step", "tokens a step"):
        table.add_column(column, justify="right")
    for name, label in (("trl", "TRL"), ("grpo_dist", "grpo-dist")):
        row = result[name]
        table.add_row(
            label, f"{row['samples_per_second']:.2f}", f"{row['seconds_per_step']:.1f}",
            *(f"{row['split'][p]:.1f}" for p in PARTS), f"{row['cpu_seconds_per_step']:.0f}",
            f"{row['tokens_per_step']:.0f}",
        )  # fmt: skip
    table.add_row("ratio", f"{result['ratio']:.2f}", *("" for _ in range(5)), f"{result['cpu_ratio']:.2f}")
    Console(stderr=True).print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="turns of each")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a turn")
    parser.add_argument("--warm", type=int, default=1, help="steps of a turn before those that count")
    parser.add_argument("--peer-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="TRL's weights")
    parser.add_argument("--peer-batch", type=int, default=16, help="samples of one of TRL's forward passes")
    options = parser.parse_args(argv)
    result = measure(options.turns, options.steps, options.warm, options.peer_dtype, options.peer_batch)
    show(result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
