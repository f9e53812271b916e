"""Who has joined: asked of Ray's head, with a limit and the names of those who are missing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.errors import GrpoDistError

NODE_LABEL = "grpo.dev/node"


def answers(address: str, seconds: float = 2) -> bool:
    """Whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=seconds):
            return True
    except OSError:
        return False


def living_names(address: str) -> set[str]:
    """The names (label grpo.dev/node) of all living nodes. The token must be in this process's environment."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # seconds to import, and only the head needs it

    infos = GcsClient(address=address).get_all_node_info(timeout=10).values()
    return {str(dict(info.labels).get(NODE_LABEL, info.node_manager_address)) for info in infos if info.state == 0}


def last_lines(path: Path, count: int) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


def missing_text(expect: Sequence[str], present: set[str], states: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per missing node: what it said last."""
    lines = []
    for name in expect:
        if name in present:
            continue
        said = states.get(name)
        what = (
            f"{said['state']} {said['detail']}".strip() if said else "never reported: not started, or no shared storage"
        )
        lines.append(f"  {name}: {what}")
    return "\n".join(lines)


def wait_for_nodes(
    address: str,
    expect: Sequence[str],
    seconds: float,
    states: Callable[[], Mapping[str, Mapping[str, Any]]],
    interrupt: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Returns once every expected node lives, or ``interrupt`` raises InterruptedError.

    Raises:
        GrpoDistError: not within ``seconds``, or a node says that it failed; lists who is missing and why.
    """
    deadline, told = time.monotonic() + seconds, -1
    while True:
        try:
            interrupt()
        except InterruptedError:
            return
        present = living_names(address) if expect else set()
        missing = [name for name in expect if name not in present]
        if not missing:
            return
        heard = states()
        failed = [name for name in missing if heard.get(name, {}).get("state") == "failed"]
        if failed or time.monotonic() > deadline:
            limit = "" if failed else f" within {seconds:g} s"
            raise GrpoDistError(
                f"{len(expect) - len(missing)} of {len(expect)} nodes joined{limit}; missing:\n"
                + missing_text(expect, present, heard)
            )
        if len(missing) != told:
            told = len(missing)
            say(f"waiting for {', '.join(missing)} (up to {seconds:g} s)")
        time.sleep(1)
