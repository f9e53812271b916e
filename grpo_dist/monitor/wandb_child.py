"""The process that owns wandb: reads JSON lines from stdin, prints warnings for the user to stdout. See tracking.py.

    line 1   how to start            {"log": …} {"table": …} {"finish": exit code}; end of input: the driver is gone

Signals for the run (Ctrl-C in a terminal, a scheduler's SIGTERM) reach this process too; it ignores them, because the
driver ends it by closing the pipe, after the last step was logged.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import shutil
import signal
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ORPHAN_SECONDS = 10.0  # to finish in, when the driver was killed


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever wandb prints must not look like a warning of ours
    lines = (json.loads(line) for line in sys.stdin)
    start = next(lines, None)
    if start is None:
        return
    try:
        _serve(start, lines, said)
    except Exception as error:  # the last frame of this process: whatever wandb raises becomes one sentence
        _say(said, f"W&B stopped ({type(error).__name__}: {_one_line(error)}); metrics.jsonl has every row")
        for _ in lines:  # keep reading, so that the driver's pipe never fills
            pass


def _serve(start: dict[str, Any], lines: Iterator[dict[str, Any]], said: Any) -> None:
    import wandb

    run = _begin(wandb, start, said)
    memory = Path(start["run_dir"]) / "wandb" / "grpo_dist.json"
    row = int(start["row"])
    sent: dict[str, int] = dict(start["sent"])
    _remember(memory, start["init"]["id"], row, sent)
    exit_code, seconds = 255, ORPHAN_SECONDS  # unless the driver says how it ended: it was killed
    for line in lines:
        if "finish" in line:
            exit_code, seconds = int(line["finish"]), float(start["finish_seconds"])
            break
        row += 1
        if "log" in line:
            run.log(line["log"], step=row)
        elif "alert" in line:
            run.alert(title="grpo-dist", text=f"step {line['of']}: {line['alert']}", level="WARN")
        else:
            table = line["table"]
            run.log(
                {table["name"]: wandb.Table(columns=table["columns"], data=table["rows"]), "step": table["step"]},
                step=row,
            )
        sent[line["kind"]] = max(int(line["of"]), sent.get(line["kind"], 0))
        _remember(memory, start["init"]["id"], row, sent)
    # finish() waits for the upload, for ever if the server does not answer; its own limit does not cover everything
    threading.Timer(seconds + 2, _give_up, (said, start["run_dir"])).start()
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        _give_up(said, start["run_dir"])
    if shutil.disk_usage(memory.parent).free < 1 << 20:  # wandb itself says nothing
        _say(said, f"the disk of {memory.parent} is full: W&B's files there are not complete; metrics.jsonl is")
    os._exit(0)


def _begin(wandb: Any, start: dict[str, Any], said: Any) -> Any:
    """Start the W&B run: online when asked for or when a key is there, offline when that fails."""
    settings = {
        "init_timeout": start["init_seconds"],
        "login_timeout": start["init_seconds"],
        "finish_timeout": start["finish_seconds"],
        "finish_timeout_raises": True,
        "console": "off",
        "silent": True,
        "disable_git": True,  # a remote's address may carry a token
        "disable_code": True,
        "save_code": False,
        "disable_job_creation": True,
        "program": "grpo-dist",
    }
    common = dict(start["init"], dir=start["run_dir"])
    if start["online"] or (start["online"] is None and _has_key()):
        try:
            _knock(float(start["init_seconds"]))
            return _with_own_axis(wandb.init(mode="online", settings=wandb.Settings(**settings), **common))
        except (wandb.Error, OSError) as error:
            upload = f"wandb sync {start['run_dir']}/wandb/offline-run-*"
            _say(said, f"W&B cannot be reached ({_one_line(error)}); going on offline, upload later with `{upload}`")
    return _with_own_axis(wandb.init(mode="offline", settings=wandb.Settings(**settings), **common))


def _base_url() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def _knock(seconds: float) -> None:
    """Return when the server answers anything at all.

    A wandb service process that waits for a silent server is stuck: not even an offline run can be started in it. So
    the server is tried first by plain means.

    Raises:
        OSError: no answer within the limit.
    """
    try:
        urllib.request.urlopen(_base_url(), timeout=seconds).close()
    except urllib.error.HTTPError:
        return  # an answer
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return  # somebody is there; wandb has its own idea of certificates
        raise


def _with_own_axis(run: Any) -> Any:
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _has_key() -> bool:
    """A key in the environment, or in the netrc file, where ``wandb login`` keeps it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_base_url()).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _remember(memory: Path, run_id: str, row: int, sent: dict[str, int]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    aside = memory.with_suffix(".tmp")
    aside.write_text(json.dumps({"id": run_id, "row": row, "sent": sent}), encoding="utf-8")
    os.replace(aside, memory)


def _give_up(said: Any, run_dir: str) -> None:
    _say(said, f"W&B did not finish in time; its files are in {run_dir}/wandb: upload them with `wandb sync`")
    os._exit(1)


def _say(said: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # the driver is gone
        said.write(text + "\n")
        said.flush()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    main()
