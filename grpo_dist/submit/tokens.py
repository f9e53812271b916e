"""Reading a cluster's token where a request needs its value. The value goes into a header and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.launch.tokens import check_token


def read_token(path: Path) -> str:
    return check_token(path).read_text().strip()


def find_token(named: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The token of an existing cluster: the named file, else where Ray itself looks for it.

    Raises:
        UserError: nowhere; says what to do.
    """
    if named:
        return read_token(Path(named).expanduser())
    if value := env.get("RAY_AUTH_TOKEN"):
        return value
    for path in filter(None, (env.get("RAY_AUTH_TOKEN_PATH"), "~/.ray/auth_token")):
        if (file := Path(path).expanduser()).is_file():
            return read_token(file)
    raise UserError(
        "no token for this Ray cluster: set ray.token to the file that the head node uses (RAY_AUTH_TOKEN_PATH there), "
        "or ray.authentication: none if the cluster really has none"
    )
