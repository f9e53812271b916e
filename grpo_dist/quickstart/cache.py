"""Models that are made on this machine on first use: each a folder in the cache, complete or absent.

    target there?  ── yes ─► its path
         no ─► [file lock] ─► written aside ─► renamed

Two processes that ask at once make it once; what a killed one left is removed by the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_dist.errors import UserError


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/grpo_dist``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_dist"


def made_once(target: Path, write: Callable[[Path], None], what: str) -> Path:
    """``target``, after ``write(aside)`` has filled it if it was not there. ``what`` names it in messages.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if target.is_dir():
        return target
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():  # somebody else made it while we waited
                return target
            for left in target.parent.glob(f".{target.name}.*"):  # of one that was killed; we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            write(aside)
            os.replace(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"{what} cannot be stored in {target.parent}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return target
