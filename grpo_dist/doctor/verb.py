"""``grpo-dist doctor [--cluster FILE] [--json]``: this machine, the place a cluster file names, the cluster joined.

    this machine ─► W&B ─► the back end of --cluster, from outside ─► the nodes of RAY_ADDRESS, from inside

A line each: ok, warn or fail, with what to do. Exit status 0 without a fail, 1 with one, 2 for wrong input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grpo_dist.doctor.machine import Row, look
from grpo_dist.doctor.outside import outside_rows, refuse_rendered_only, rows_as_json, wandb_row
from grpo_dist.submit.cluster_file import load_cluster


def doctor(*, cluster: Path | None = None, as_json: bool = False, say: Callable[[str], None] = print) -> int:
    """Returns the exit status."""
    loaded = load_cluster(cluster).cluster if cluster is not None else None
    if loaded is not None:
        refuse_rendered_only(loaded)
    joined = bool(os.environ.get("RAY_ADDRESS"))

    def rows() -> Iterator[Row]:
        # Inside a cluster this machine is one of the nodes, which are all asked.
        if not joined:
            yield from look(loaded.interface if loaded is not None else None).rows
        yield wandb_row()
        if loaded is not None:
            yield from outside_rows(loaded)
        if joined:
            from grpo_dist.doctor.nodes import cluster_rows

            yield from cluster_rows(loaded)

    found = list(rows())
    if as_json:
        say(json.dumps(rows_as_json(found), ensure_ascii=False))  # on one line: it is found in a job's log
    else:
        for line in lines(found):
            say(line)
    return 1 if any(row.level == "fail" for row in found) else 0


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """For people: by node, in the order of asking."""
    width = max(len(row.subject) for row in rows)
    for node in dict.fromkeys(row.node for row in rows):
        if node:
            yield f"\n{node}"
        for row in rows:
            if row.node == node:
                yield f"{row.level:<5} {row.subject:<{width}}  {row.text}"
    counts = {level: sum(row.level == level for row in rows) for level in ("warn", "fail")}
    yield f"\n{counts['fail']} failed, {counts['warn']} warnings"
