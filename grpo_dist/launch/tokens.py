"""Ray's cluster token: one per run, in a file that only its owner reads, and handed on by path.

    write_token(RUN/ray_token) -> token_env(path) -> environment of every `ray start`, driver and client

A value in an environment shows up in process listings, crash dumps and Ray's own logs; a path does not. Ray turns
authentication on by itself in some commands and not in others (it depends on whether a token file happens to exist in
the home folder), so the mode is always set explicitly, on every node alike.
Left out: encryption. A token proves who may talk, it does not hide what is said (docs/security.md).
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from grpo_dist.errors import UserError

# These name a token or a cluster of somebody else when inherited; they never reach a node or client that we start.
INHERITED = (
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_AUTH_MODE",
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_JOB_HEADERS",
)


def write_token(path: Path) -> Path:
    """A new random token in ``path`` (mode 0600). An existing file is kept: nodes that are up hold its token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        check_token(path)
        return path
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def check_token(path: Path) -> Path:
    """``path`` holds a token that nobody else reads; otherwise a `UserError` that says what to do about it."""
    if not path.is_file():
        raise UserError(f"token file {path} does not exist: copy it from where the run was submitted (mode 0600)")
    if path.stat().st_uid == os.getuid() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        raise UserError(f"token file {path} has mode {mode:04o}, others can read it: chmod 600 {path}")
    if not path.read_text().strip():
        raise UserError(f"token file {path} is empty: remove it and let `grpo-dist submit` make a new one")
    return path


def token_env(path: Path | None) -> dict[str, str]:
    """What a process needs to talk to the cluster of this token; ``None`` says that authentication is off."""
    if path is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def clean_env(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without the variables that point to another cluster or token."""
    return {key: value for key, value in base.items() if key not in INHERITED}
