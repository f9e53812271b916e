"""Which Ray: the one RAY_ADDRESS names, or a fresh one on this machine.

A cluster that merely happens to run here is never joined: it may be somebody else's. Token authentication is Ray's own
(on for a Ray started here; a joined one needs RAY_AUTH_MODE=token and the token in every node's environment).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray

from grpo_dist.errors import Interrupted, UserError
from grpo_dist.fleet.guard import MARK

CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray this process talks to."""

    address: str
    started_here: bool  # then no node will ever join: a misfit is final


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Connect to Ray, and let go of it at the end. A connection that this process already has is used and kept.

    Raises:
        UserError: the cluster that RAY_ADDRESS names does not answer or refuses the token.
    """
    if ray.is_initialized():
        yield Cluster(ray.get_runtime_context().gcs_address, started_here=not os.environ.get("RAY_ADDRESS"))
        return
    address = os.environ.get("RAY_ADDRESS")
    with nullcontext() if address else _guarded():
        try:
            _connect(address)
            os.environ.pop(MARK, None)  # the tracker's process is not Ray's: it may take its time to hand over
            yield Cluster(ray.get_runtime_context().gcs_address, started_here=address is None)
        finally:
            ray.shutdown()


@contextmanager
def _guarded() -> Iterator[None]:
    """Ray started inside carries a mark; a guard ends what is left of it after this block, or after this process."""
    mark = secrets.token_hex(16)
    guard = subprocess.Popen(
        [sys.executable, "-m", "grpo_dist.fleet.guard", mark],
        stdin=subprocess.PIPE,  # never written to: its end is the end of this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
    os.environ[MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
        assert guard.stdin is not None
        guard.stdin.close()


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Processes started inside lead process groups of their own.

    A signal to this job's group (``timeout``, systemd, a closing terminal) is meant for the driver: it still needs Ray
    in order to finish the step and save. Ray has no option for it.
    """
    plain = subprocess.Popen.__init__

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{"process_group": 0, **kwargs})

    setattr(subprocess.Popen, "__init__", start)  # noqa: B010 - mypy knows that a method is no variable
    try:
        yield
    finally:
        setattr(subprocess.Popen, "__init__", plain)  # noqa: B010


def _refuse_silence(address: str) -> None:
    """Ray waits minutes for an address where nobody listens, and fills the screen meanwhile."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", "local"
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error


def _connect(address: str | None) -> None:
    if address:
        _refuse_silence(address)
    # Ray warns that its token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        with _groups_of_their_own():
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                log_to_driver=False,  # workers' output stays in Ray's log folder: the console belongs to the display
                logging_level=logging.WARNING,
                configure_logging=True,
            )
    except SystemExit as error:  # Ray's own handler, while it starts
        raise Interrupted("stopped while Ray was starting: nothing had to be saved") from error
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if not address:
            raise
        mode = os.environ.get("RAY_AUTH_MODE", "not set")
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS={address}: {str(error).strip().splitlines()[0]}\n"
            f"  RAY_AUTH_MODE is {mode}; a cluster with token authentication (Ray's default since 2.5x) needs "
            "RAY_AUTH_MODE=token and the token (RAY_AUTH_TOKEN_PATH) in this environment as on every node"
        ) from error
