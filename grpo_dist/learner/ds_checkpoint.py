"""DeepSpeed's part of a checkpoint: each rank's shards, written so that a failing rank leaves no peer waiting.

    save   every rank writes its files under folder/learner; all ranks learn whether all succeeded
    load   same number of ranks: as they are, bit for bit
           another number: rank 0 converts to DeepSpeed's universal format in a scratch folder beside, all load from it

DeepSpeed writes in place, syncs nothing and ends in a barrier: a rank whose disk is full would raise and the others
wait in vain. So the writer notes failures instead of raising, and they are exchanged after the barrier. Which files
make a good checkpoint, and the renaming, are the driver's (checkpoint.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from grpo_dist.errors import CheckpointError
from grpo_dist.learner.lockstep import raise_together

TAG = "learner"
CONVERT_SECONDS = 3600.0


class LockstepWriter:
    """Stands before DeepSpeed's own writer: syncs what it writes and never raises.

    ``failure`` says what went wrong since it was last cleared.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._note(path, error)

    def save(self, state_dict: Any, path: str) -> None:
        if self.failure is not None:
            return
        noted = None
        try:
            with open(path, "wb") as file:
                noted = _NotingFile(file)
                torch.save(state_dict, cast(IO[bytes], noted))
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            self._note(path, (noted and noted.error) or error)

    def _note(self, path: str, error: Exception) -> None:
        self.failure = self.failure or f"{path}: {error}"


class _NotingFile:
    """Keeps the error of a write: torch's writer replaces "No space left on device" by a broken position."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_in_lockstep(engine: Any) -> None:
    """Once per engine, before its first save."""
    engine.checkpoint_engine = LockstepWriter(engine.checkpoint_engine)
    # Rank 0 would copy two scripts of DeepSpeed's into each checkpoint, past the writer, and fail alone on a full disk.
    engine._copy_recovery_script = lambda save_path: None


def save(engine: Any, folder: Path, extra: dict[str, Any], beside: dict[str, Any]) -> None:
    """Write this rank's state under ``folder``, and what is ``beside`` it (file name: content).

    Raises CheckpointError on every rank when one of them failed.
    """
    writer: LockstepWriter = engine.checkpoint_engine
    writer.failure = None
    # What is frozen (with LoRA: the whole model) is read from the model folder again.
    engine.save_checkpoint(
        str(folder), tag=TAG, client_state={"grpo_dist": extra}, save_latest=False, exclude_frozen_parameters=True
    )
    for name, content in beside.items():
        writer.save(content, str(folder / TAG / name))
    try:
        raise_together(writer.failure)
    except CheckpointError:  # what was written would keep a full disk full
        shutil.rmtree(folder / TAG, ignore_errors=True)
        raise


def load(engine: Any, folder: Path, *, rank: int, world: int) -> dict[str, Any]:
    """Load ``folder`` into an engine that has not trained; returns what ``save`` was given, plus ``same_world``."""
    saved = len(list((folder / TAG).glob("*_optim_states.pt")))
    if not saved:
        raise CheckpointError(f"{folder} holds no learner state ({TAG}/*_optim_states.pt)")
    source = folder
    if saved != world:
        source = folder.with_name(f"{folder.name}.universal.tmp")
        if rank == 0:
            shutil.rmtree(source, ignore_errors=True)
        torch.distributed.barrier()  # nobody may take what an earlier conversion left for the new one
        if rank == 0:
            _convert(folder, source)
        raise_together(_wait_converted(source))
    engine._config.load_universal_checkpoint = saved != world
    complete = all(p.requires_grad for p in engine.module.parameters())
    path, client = engine.load_checkpoint(str(source), tag=TAG, load_module_strict=complete)
    if path is None:
        raise CheckpointError(f"DeepSpeed found nothing to load under {source / TAG}")
    for state in engine.optimizer.optimizer.state.values():
        if "step" in state and torch.is_tensor(state["step"]):  # the universal loader shares one tensor among groups
            state["step"] = state["step"].clone()
    torch.distributed.barrier()  # all have read
    if saved != world and rank == 0:
        shutil.rmtree(source, ignore_errors=True)
    return {**client["grpo_dist"], "same_world": saved == world}


def own_shard(saved: Sequence[Tensor], numel: int, rank: int, size: int) -> Tensor:
    """``rank``'s part, of at most ``size`` elements, of a tensor of ``numel`` elements that lies in equal shards.

    The last shards are padded, or empty: what is beyond ``numel`` means nothing.
    """
    if len(saved[0]) == size and rank < len(saved):  # as it was cut then
        return saved[rank][: max(0, numel - rank * size)]
    return torch.cat(list(saved))[:numel][rank * size : (rank + 1) * size]


def _convert(folder: Path, out: Path) -> None:
    """Write ``folder`` in universal format to ``out``; ends with out/done, which holds the error if there was one."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
               "--input_folder", str(folder / TAG), "--output_folder", str(out / TAG)]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    error = ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERT_SECONDS, env=environment, check=False
        )
        if done.returncode:
            error = f"converting {folder} to the universal format failed: {done.stderr.strip()[-600:]}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = f"converting {folder} to the universal format failed: {failure}"
    (out / "latest_universal").write_text(TAG)
    (out / "done.part").write_text(error)
    os.replace(out / "done.part", out / "done")


def _wait_converted(out: Path) -> str | None:
    """Wait for rank 0 without a collective, whose limit a long conversion would pass."""
    deadline = time.monotonic() + CONVERT_SECONDS + 60
    while not (out / "done").exists():
        if time.monotonic() > deadline:
            return f"{out / 'done'} did not appear: is the folder on a file system that all learner nodes share?"
        time.sleep(0.2)
    return (out / "done").read_text() or None
