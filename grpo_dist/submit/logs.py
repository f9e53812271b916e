"""The output of one worker: live through the dashboard, afterwards from the logs that each node kept.

Which process is rollout-1 is in the run's events: every start of a worker names its pid and node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.submit.backend import follow_files
from grpo_dist.submit.ray_api import RayApi, whole_lines
from grpo_dist.submit.records import Record
from grpo_dist.submit.tokens import read_token


def worker_place(progress: dict[str, Any] | None, role: str, rank: int) -> tuple[str | None, int]:
    """(node address, pid) of the newest process that was this worker.

    Raises:
        UserError: there was none; lists who there is.
    """
    workers: dict[str, dict[str, Any]] = (progress or {}).get("progress", {}).get("workers", {})
    name = f"{role}-{rank}"
    if name not in workers:
        known = ", ".join(sorted(workers)) or "none yet"
        raise UserError(f"no worker {name} has started in this run; started: {known}")
    return workers[name].get("node"), int(workers[name]["pid"])


def shared_lines(
    record: Record,
    progress: Callable[[Record], dict[str, Any] | None],
    ended: Callable[[], bool],
    *,
    role: str | None,
    rank: int,
    follow: bool,
) -> Iterator[str]:
    """Lines of the driver, or with ``role`` of one worker, of a run whose files this machine sees."""
    if role is not None:
        return worker_lines(record, role, rank, progress(record), ended, follow=follow)
    return follow_files(record, ended, follow=follow)


def worker_lines(
    record: Record, role: str, rank: int, progress: dict[str, Any] | None, ended: Callable[[], bool], *, follow: bool
) -> Iterator[str]:
    """Lines of a worker of a run whose files this machine sees."""
    node, pid = worker_place(progress, role, rank)
    cluster = (progress or {}).get("cluster") or {}
    exited = (progress or {}).get("exit") is not None
    if not exited and cluster.get("dashboard") and node is not None:
        api = RayApi(str(cluster["dashboard"]), read_token(Path(cluster["token"])))
        yield from whole_lines(live_texts(api, node, pid, ended, follow=follow))
        return
    folders = [Path(record.launch).glob("attempt-*/ray-logs/*")] if not cluster.get("session") or exited else []
    logs = sorted(path for folder in folders for root in folder for path in kept_logs(root, pid))
    if cluster.get("session") and not exited:
        logs = sorted(
            path for root in Path(cluster["session"]).glob("session_2*/logs") for path in kept_logs(root, pid)
        )
    if not logs:
        raise GrpoDistError(f"no log of {role}-{rank} (pid {pid}) was kept in {record.launch}/attempt-*/ray-logs")
    for path in logs:
        yield f"--- {path}"
        yield from path.read_text(errors="replace").splitlines()


def live_texts(api: RayApi, node: str, pid: int, ended: Callable[[], bool], *, follow: bool) -> Iterator[str]:
    """What the process wrote to its standard output; and its errors first, which do not grow."""
    yield from api.worker_log(node, pid, "err", ended, follow=False)
    yield from api.worker_log(node, pid, "out", ended, follow=follow)


def kept_logs(folder: Path, pid: int) -> list[Path]:
    return [path for path in folder.glob("worker-*") if re.search(rf"-{pid}\.(out|err)$", path.name)]
