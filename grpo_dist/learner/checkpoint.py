"""Which checkpoint is good, and how a new one becomes so: complete or absent, whatever moment the machine dies at.

    begin(12) ─► 000012.tmp ─► ranks write learner/ ─► commit: state, manifest with a hash per file, fsync
              ─► rename to 000012 ─► `latest` replaced ─► older ones pruned

A folder without ".tmp" is complete by construction; ``newest_good`` verifies every hash all the same (disks flip bits,
people copy half of a folder) and says why newer ones were refused. Nothing old is removed before the new one is
durable. All of this runs on the driver; the learner ranks only write into the folder they are given.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from grpo_dist.errors import CheckpointError
from grpo_dist.types import RunState, ScoredGroup

FORMAT = 1
MANIFEST, STATE, BUFFERED, LATEST = "manifest.json", "state.json", "buffered.pkl", "latest"
_NAME = re.compile(r"^(\d{6,})(\.old)?$")
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    world: int  # learner ranks that wrote it
    recipe_hash: str
    files: dict[str, dict[str, Any]]  # relative path -> {"bytes": n, "digest": xxh3-128 hex}
    created: float
    extra: dict[str, Any] = field(default_factory=dict)  # whatever the driver wants back
    format: int = FORMAT


class Restored(NamedTuple):
    """What to resume from. ``path`` is None when there is no checkpoint at all: a fresh run."""

    path: Path | None
    state: RunState
    refused: list[str]  # one sentence per newer checkpoint that was not good
    manifest: Manifest | None = None


class CheckpointStore:
    """The checkpoints of one run, below ``root``. One process writes; any number may read."""

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep = {keep}")
        self.root, self.keep = Path(root), keep

    def begin(self, step: int) -> Path:
        """An empty folder for the ranks to write into. Removes what an interrupted save has left."""
        with self._named_errors(f"checkpoint of step {step}"):
            self.root.mkdir(parents=True, exist_ok=True)
            self.clean()
            aside = self.root / f"{step:06d}.tmp"
            aside.mkdir()
        return aside

    def commit(
        self, aside: Path, state: RunState, *, recipe_hash: str = "", extra: dict[str, Any] | None = None
    ) -> Path:
        """Make the folder that ``begin`` gave a checkpoint. Returns its final path.

        Raises:
            CheckpointError: it could not be written (a full disk is named as such); older checkpoints are untouched.
        """
        final = aside.with_suffix("")
        with self._named_errors(f"checkpoint of step {state.step}", aside):
            _write_state(aside, state)
            files = _describe(aside)
            world = sum(name.endswith("_optim_states.pt") for name in files)
            manifest = Manifest(state.step, world, recipe_hash, files, time.time(), extra or {})
            _write_durably(aside / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
            for path in [*(p for p in aside.rglob("*")), aside]:
                _sync(path)
            if final.exists():  # the same step again: both stay readable until the new one has its name
                old = final.with_name(f"{final.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                os.rename(final, old)
            os.rename(aside, final)
            _sync(self.root)
            self._point_to(final)
        self._prune(state.step)
        return final

    def abort(self, aside: Path) -> None:
        """Remove a folder that ``begin`` gave, after the ranks could not write it."""
        shutil.rmtree(aside, ignore_errors=True)

    def newest_good(self) -> Restored:
        """The newest checkpoint that is complete and unchanged.

        Raises:
            CheckpointError: there are checkpoints, but none is good; says what is wrong with each.
        """
        refused: list[str] = []
        for path in self.candidates():
            try:
                manifest = verify(path)
                return Restored(path, read_state(path), refused, manifest)
            except CheckpointError as error:
                refused.append(str(error))
        if refused:
            raise CheckpointError(f"no checkpoint under {self.root} is usable: " + "; ".join(refused))
        return Restored(None, RunState(), refused)

    def candidates(self) -> list[Path]:
        """Finished checkpoints, newest first; half-written ones (.tmp) are none."""
        found = [(m, p) for p in self.root.glob("*") if p.is_dir() and (m := _NAME.match(p.name))]
        return [p for m, p in sorted(found, key=lambda f: (int(f[0].group(1)), f[0].group(2) is None), reverse=True)]

    def clean(self) -> None:
        """Remove half-written folders. Only for the process that writes."""
        for path in self.root.glob("*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _point_to(self, final: Path) -> None:
        aside = self.root / f"{LATEST}.part"
        _write_durably(aside, f"{final.name}\n".encode())
        os.replace(aside, self.root / LATEST)
        _sync(self.root)

    def _prune(self, step: int) -> None:
        """Keep the newest ``keep`` up to ``step``. Later ones belong to a future that a resume has abandoned."""
        past = [p for p in self.candidates() if int(p.name.split(".")[0]) <= step and not p.name.endswith(".old")]
        for path in self.candidates():
            if path not in past[: self.keep]:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _named_errors(self, what: str, aside: Path | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = f"the disk is full ({_free(self.root)})" if full else str(error)
            older = self.candidates()
            kept = f"; {older[0].name} is still there" if older else ""
            raise CheckpointError(f"{what} could not be written to {self.root}: {why}{kept}") from error


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there and unchanged.

    Raises:
        CheckpointError: says which file and what is wrong with it.
    """
    try:
        manifest = Manifest(**json.loads((path / MANIFEST).read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: {MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path.name}: {MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path.name}: written in format {manifest.format}, this version reads {FORMAT}")
    for name, wanted in manifest.files.items():  # sizes first: they cost nothing
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path.name}: {name} is missing")
        if (size := file.stat().st_size) != wanted["bytes"]:
            raise CheckpointError(f"{path.name}: {name} has {size} bytes, {wanted['bytes']} were written")
    names = list(manifest.files)
    for name, digest in zip(names, _digests([path / n for n in names]), strict=True):
        if digest != manifest.files[name]["digest"]:
            raise CheckpointError(f"{path.name}: the content of {name} has changed since it was written")
    return manifest


def read_state(path: Path) -> RunState:
    """Raises CheckpointError when it cannot be read."""
    try:
        known = json.loads((path / STATE).read_text())
        buffered: tuple[ScoredGroup, ...] = pickle.loads((path / BUFFERED).read_bytes())
        known["resting"] = tuple(known.get("resting", ()))
        return RunState(**known, buffered=buffered)
    except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{path.name}: the run state cannot be read: {error}") from error


def _write_state(folder: Path, state: RunState) -> None:
    plain = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "buffered"}
    _write_durably(folder / STATE, json.dumps(plain, indent=1).encode())
    _write_durably(folder / BUFFERED, pickle.dumps(state.buffered))


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    digests = _digests(paths)
    return {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "digest": d}
        for p, d in zip(paths, digests, strict=True)
    }


def _digests(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(max_workers=4) as pool:  # reading and hashing both leave the interpreter
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(root: Path) -> str:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return "free space unknown"
    return f"{usage.free / 1e6:.0f} of {usage.total / 1e6:.0f} MB free"
