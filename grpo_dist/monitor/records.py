"""The run folder: everything a run leaves behind, as plain files that outlive a crash.

    RunFolder.open(recipe) ─► one JSON line per step, event and evaluation (each line flushed)
                              rollouts/000012.jsonl (written aside, renamed)
    resumed at step n      ─► lines and files beyond n are removed, so that no step is there twice

A folder belongs to one run: its recipe.yaml is compared with the recipe at hand, apart from keys that do not change
what the run is (how long, how many workers, how it is watched). Checkpoints are written by learner/checkpoint.py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo_dist.config import Recipe
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.recipe_file import dump_recipe, load_recipe
from grpo_dist.types import Sample, ScoredGroup

# What may differ between a run and its continuation. A prefix names all keys under it.
MAY_CHANGE = (
    "description",
    "run.steps",
    "run.resume",
    "run.out",
    "rollout.workers",
    "rollout.tensor_parallel",
    "rollout.engine",
    "rollout.placement",
    "verifiers.workers",
    "verifiers.placement",
    "verifiers.reward_model",
    "learner.ranks",
    "learner.zero",
    "learner.deepspeed",
    "learner.micro_batch_tokens",
    "learner.logprob_chunk_tokens",
    "learner.gradient_checkpointing",
    "learner.placement",
    "weights",
    "checkpoint",
    "evaluate",
    "tracking",
    "faults",
)


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path, lock: IO[str] | None = None, *, fresh: bool = False) -> None:
        self.path = path
        self.fresh = fresh  # nothing was trained here before
        self._lock = lock

    # ---- opening

    @classmethod
    def open(cls, recipe: Recipe) -> RunFolder:
        """Create the folder of this recipe, or with run.resume take up the one that is there.

        Raises:
            UserError: the folder holds another run, or a run that was not asked to be continued, or is in use.
        """
        path = recipe.run_dir
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise UserError(f"run folder {path} cannot be written: {error.strerror}") from error
        try:
            fresh = cls._check_owner(path, recipe)
            folder = cls(path, lock, fresh=fresh)
            folder._write_text("recipe.yaml", dump_recipe(recipe))
            folder.rollouts.mkdir(exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
            for name in ("metrics.jsonl", "events.jsonl", "evals.jsonl"):
                folder._drop_broken_tail(folder.path / name)
        except BaseException:
            lock.close()
            raise
        return folder

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """An existing run's folder for reading (reports, exports); takes no lock.

        Raises:
            UserError: there is no run.
        """
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"{path} is not the folder of a run: it has no recipe.yaml")
        return cls(path)

    @staticmethod
    def _check_owner(path: Path, recipe: Recipe) -> bool:
        stored_file = path / "recipe.yaml"
        # Names with a dot: the lock, and files that were being written aside when an earlier try was killed.
        others = sorted(p.name for p in path.iterdir() if p.name[0] != "." and p.name != "recipe.yaml")
        if not stored_file.exists():
            if others:
                raise UserError(
                    f"run folder {path} holds files that are not a run's ({', '.join(others[:5])}); "
                    "choose another run.name or run.out"
                )
            return True
        reached = last_step(path / "metrics.jsonl")
        if reached is None and not any(path.glob("checkpoints/[0-9]*")):
            for name in ("events.jsonl", "evals.jsonl"):  # of a try that ended before its first step
                (path / name).unlink(missing_ok=True)
            return True
        if not recipe.run.resume:
            raise UserError(
                f"run folder {path} already holds a run that reached step {reached or 0}; "
                "continue it with --resume, or choose another run.name"
            )
        differing = differing_keys(load_recipe(stored_file), recipe)
        if differing:
            lines = "".join(f"\n  {key}: {old!r} in the folder, {new!r} now" for key, old, new in differing)
            raise UserError(f"run folder {path} belongs to another run; these keys differ:{lines}")
        return False

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- places

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"{step:06d}.jsonl"

    def recipe(self) -> Recipe:
        return load_recipe(self.path / "recipe.yaml")

    # ---- writing

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; values that are no finite number are written as null."""
        self._append("metrics.jsonl", {"step": step, "time": time.time(), **values})

    def append_event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        self._append("events.jsonl", {"time": time.time(), "kind": kind, **fields})

    def append_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """One line of evals.jsonl."""
        self._append("evals.jsonl", {"step": step, "time": time.time(), **values})

    def has_eval(self, step: int) -> bool:
        """Whether evals.jsonl has an evaluation of this step: one at the step where a run is resumed stays."""
        return any(row.get("step") == step for row in read_jsonl(self.path / "evals.jsonl"))

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[Sample] = (),
        dropped: Mapping[int, str] | None = None,
    ) -> Path:
        """Write every sample of a step to rollouts/NNNNNN.jsonl.

        Args:
            step: the optimizer step that used (or dropped) the groups.
            groups: trained and dropped groups.
            samples: what was trained on; a sample that is absent or has an empty loss mask was not trained.
            dropped: group id -> why the group was not trained at all.
        """
        trained = {(s.group_id, s.index): s for s in samples}
        why = dropped or {}
        target = self.rollout_file(step)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with aside.open("w", encoding="utf-8") as file:
                for group in groups:
                    for row in rollout_rows(step, group, trained, why.get(group.group_id)):
                        file.write(_line(row))
            os.replace(aside, target)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise GrpoDistError(f"cannot write {target}: {error.strerror}") from error
        return target

    def truncate(self, step: int) -> int:
        """Remove what lies beyond ``step``: the run goes on from there. Returns how many steps were removed.

        Events stay: they tell what happened, also in steps that are now done again.
        """
        removed = set()
        for name in ("metrics.jsonl", "evals.jsonl"):
            file = self.path / name
            rows = list(read_jsonl(file))
            kept = [row for row in rows if row.get("step", 0) <= step]
            removed |= {row["step"] for row in rows if row.get("step", 0) > step and name == "metrics.jsonl"}
            if len(kept) != len(rows):
                self._write_text(name, "".join(_line(row) for row in kept))
        for file in self.rollouts.glob("*.jsonl"):
            if file.stem.isdigit() and int(file.stem) > step:
                file.unlink()
        return len(removed)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        file = self.path / name
        data = _line(row).encode()
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(handle).st_size
            try:
                written = os.write(handle, data)
            except OSError as error:
                raise GrpoDistError(f"cannot write {file}: {error.strerror}") from error
            if written != len(data):  # a disk that fills up takes a part of the line
                os.ftruncate(handle, before)
                raise GrpoDistError(f"cannot write {file}: {written} of {len(data)} bytes written, is the disk full?")
        finally:
            os.close(handle)

    def _write_text(self, name: str, text: str) -> None:
        aside = self.path / f".{name}.{os.getpid()}"
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path / name)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise GrpoDistError(f"cannot write {self.path / name}: {error.strerror}") from error

    def _drop_broken_tail(self, file: Path) -> None:
        """A line without its newline was being written when the machine stopped."""
        if not file.exists():
            return
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            with file.open("r+b") as handle:
                handle.truncate(data.rfind(b"\n") + 1)


def _take_lock(path: Path) -> IO[str]:
    lock = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise UserError(f"run folder {path} is in use by {holder or 'another process'}") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


# ---- rows


def rollout_rows(
    step: int, group: ScoredGroup, trained: Mapping[tuple[int, int], Sample], dropped: str | None = None
) -> Iterator[dict[str, Any]]:
    """One plain row per sample of a group. ``answer`` is the gold answer as given: nothing parsed is ever printed."""
    prompt, request = group.rollout.prompt, group.rollout.request
    for index, (completion, verdict) in enumerate(zip(group.rollout.completions, group.verdicts, strict=True)):
        sample = trained.get((group.group_id, index)) if dropped is None else None
        yield {
            "step": step,
            "group_id": group.group_id,
            "index": index,
            "epoch": request.epoch,
            "seed": request.seed + index,
            "prompt_id": prompt.id,
            "source": prompt.source,
            "prompt": prompt.text,
            "completion": completion.text,
            "answer": prompt.answer,
            "verifier": prompt.verifier,
            "extra": prompt.extra,
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "versions": [[span.version, span.start, span.end] for span in completion.versions],
            "engine": group.rollout.engine,
            "seconds": group.rollout.seconds,
            "reward": verdict.reward,
            "correct": verdict.correct,
            "parts": verdict.parts,
            "error": verdict.error,
            "timed_out": verdict.timed_out,
            "verify_seconds": verdict.seconds,
            "advantage": None if sample is None else _advantage(sample),
            "trained": sample is not None and bool(sample.loss_mask.any()),
            "dropped": dropped,
        }


def _advantage(sample: Sample) -> float | None:
    """The advantage of a sample; the mean over its tokens where they differ, null when no token trains."""
    values = sample.advantages[sample.loss_mask]
    if len(values) == 0:
        return None
    return float(values[0]) if bool((values == values[0]).all()) else float(values.mean())


def _line(row: Mapping[str, Any]) -> str:
    plain = as_json(row)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as a cut-off completion may hold
        text = json.dumps(plain, ensure_ascii=True, allow_nan=False)
    return text + "\n"


def as_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null says "no number here"."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    return str(value) if isinstance(value, Path) else value


def read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; a missing file has none, a last line that was cut off is left out.

    Raises:
        GrpoDistError: a line in the middle is not JSON.
    """
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise GrpoDistError(f"{file}:{number}: not JSON: {error.msg}") from error


def last_step(metrics: Path) -> int | None:
    """The highest step of a metrics file, None when it has none."""
    return max((int(row["step"]) for row in read_jsonl(metrics) if "step" in row), default=None)


def differing_keys(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """Keys that make two recipes different runs, with both values."""
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    differing = []
    for key in {**before, **after}:
        free = any(key == prefix or key.startswith(f"{prefix}.") for prefix in MAY_CHANGE)
        if not free and before.get(key) != after.get(key):
            differing.append((key, before.get(key), after.get(key)))
    return differing


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def free_bytes(path: Path) -> int:
    """Free disk space where path is or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
