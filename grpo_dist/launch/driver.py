"""Find and signal the run's driver on the machine it lives on: for a pod's preStop hook, and for `stop --now`.

    python -m grpo_dist.launch.driver --marks DIR --signal USR1 --wait 200     save, requeue me; wait until it is gone

The driver's mark names host, pid and start time, so neither another machine nor a reused pid is ever signalled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_dist.launch.processes import is_running, started_at

MARK = "driver.json"


def mark_driver(marks: Path) -> None:
    """This process is the driver now."""
    facts = {"host": os.uname().nodename, "pid": os.getpid(), "started": started_at(os.getpid())}
    aside = marks / f".{MARK}.{os.getpid()}"
    aside.write_text(json.dumps(facts))
    aside.replace(marks / MARK)


def find_driver(marks: Path) -> int | None:
    """The driver's pid if it runs on this machine."""
    try:
        facts = json.loads((marks / MARK).read_text())
    except FileNotFoundError:
        return None
    here = facts["host"] == os.uname().nodename and is_running(facts["pid"], facts["started"])
    return int(facts["pid"]) if here else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.launch.driver")
    parser.add_argument("--marks", required=True, type=Path)
    parser.add_argument("--signal", required=True, choices=["USR1", "TERM", "KILL"])
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait for its end")
    options = parser.parse_args(arguments)
    pid = find_driver(options.marks)
    if pid is None:
        print("no driver runs here")
        return 0
    os.kill(pid, signal.Signals[f"SIG{options.signal}"])
    deadline = time.monotonic() + options.wait
    while find_driver(options.marks) is not None:
        if time.monotonic() >= deadline:
            print(f"driver {pid} still runs")
            return 1 if options.wait else 0
        time.sleep(0.2)
    print(f"driver {pid} has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
