"""The Ray actor of one learner rank: a thin shell around ``Zero3Policy`` that loads nothing heavy until ``setup``.

    driver: rank 0 .address() -> every rank .setup(spec) -> update / stage / save … on all, connect / send on rank 0

Synchronous methods, one at a time; ``ping`` has a concurrency group of its own and answers while a collective blocks. A
rank that fails in a collective is of no more use, nor are its peers: the driver ends the group (fleet/learners.py).
"""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray

from grpo_dist.learner.spec import LearnerSpec
from grpo_dist.metrics import Stats
from grpo_dist.types import FloatArray, MicroBatch, RankBatch

if TYPE_CHECKING:
    from grpo_dist.learner.zero3 import Zero3Policy
    from grpo_dist.weights.sender import EngineEndpoint, SendReport, WeightSender
    from grpo_dist.weights.source import StagedWeights


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one rank says of a staging; only rank 0 holds anything."""

    version: int
    tensors: int
    bytes: int
    seconds: float


class LearnerRank:
    """One rank. ``LearnerActor`` below is this class as a Ray actor."""

    def __init__(self) -> None:
        self._policy: Zero3Policy | None = None
        self._staged: StagedWeights | None = None
        self._sender: WeightSender | None = None
        self._busy: tuple[str, float] | None = None
        self._lock = threading.Lock()

    def address(self) -> tuple[str, int]:
        """(this node's address, a port free on it now), for the process group of all ranks. Asked of rank 0."""
        host = node_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, int(probe.getsockname()[1])

    def setup(self, spec: LearnerSpec) -> dict[str, Any]:
        """Join the group and load the model; collective. Ends with the start-up checks.

        Raises:
            UserError: the model folder is missing or the model cannot be trained packed.
            SelfCheckError: packing or the gradient's scale is not what it should be.
        """
        with self._doing("setup"):
            use_node_interface()
            # DeepSpeed calls names that torch 2.13 has renamed: thousands of lines that nobody can act on.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
            from grpo_dist.learner.zero3 import Zero3Policy

            self._policy = Zero3Policy(spec)
            checks = self._policy.self_check()
            if spec.rank == 0:
                threading.Thread(target=_load_sending_code, name="load sender", daemon=True).start()
            return {"rank": spec.rank, "pid": os.getpid(), "node": node_address(), "checks": checks}

    def update(self, batches: Sequence[RankBatch]) -> Stats:
        """One step of the run with an optimizer update per batch; collective."""
        with self._doing("update"):
            return self._ready.update(batches)

    def logprobs(self, micro: Sequence[MicroBatch]) -> list[FloatArray]:
        with self._doing("logprobs"):
            return self._ready.logprobs(micro)

    def stage(self, version: int) -> StageReport:
        """Gather the weights into rank 0's host memory, as ``version``; collective."""
        with self._doing("stage"):
            started, self._staged = time.monotonic(), None  # what was staged is overwritten from here on
            self._staged = staged = self._ready.stage(version)
            seconds = time.monotonic() - started
            return StageReport(version, len(staged.infos) if staged else 0, staged.bytes if staged else 0, seconds)

    def digests(self) -> dict[str, str]:
        """Digest of each staged tensor, by name. Rank 0 only."""
        if self._staged is None:
            raise RuntimeError("nothing is staged on this rank")
        return {info.name: self._staged.digest(info.name) for info in self._staged.infos}

    def connect(
        self,
        endpoints: Sequence[EngineEndpoint],
        backend: Literal["gloo", "nccl"] | None = None,
        *,
        connect_seconds: float = 120.0,
        send_seconds: float = 600.0,
    ) -> int:
        """Make this rank the sender of a new transfer group with exactly these engines. Rank 0 only.

        Returns the generation of the group.
        """
        with self._doing("connect"):
            if self._sender is None:
                from grpo_dist.weights.sender import WeightSender  # loads vllm: only where weights are sent from

                self._sender = WeightSender(
                    backend or self._ready.spec.backend, connect_seconds=connect_seconds, send_seconds=send_seconds
                )
            return self._sender.connect(endpoints, node_address())

    def send(self, version: int, verify: bool = True) -> SendReport:
        """Send what is staged to the connected engines, with a digest per tensor compared when asked. Rank 0 only."""
        with self._doing("send"):
            if self._staged is None or self._staged.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise RuntimeError(f"version {version} is to be sent, but {held} is staged")
            if self._sender is None:
                raise RuntimeError("connect() comes before send()")
            return self._sender.send(self._staged, version, verify=verify)

    def save(self, folder: Path) -> None:
        with self._doing("save"):
            self._ready.save(folder)

    def load(self, folder: Path) -> int:
        """Restore what ``save`` wrote, by any number of ranks; only before the first update. Returns the step."""
        with self._doing("load"):
            self._ready.load(folder)
            return self._ready.step

    def export(self, folder: Path) -> None:
        with self._doing("export"):
            self._ready.export(folder)

    @ray.method(concurrency_group="control")
    def ping(self) -> dict[str, Any]:
        """Who this is and what it is doing, at once, whatever it is doing."""
        busy = self._busy
        return {
            "pid": os.getpid(),
            "step": self._policy.step if self._policy else None,
            "doing": busy[0] if busy else None,
            "seconds": time.monotonic() - busy[1] if busy else 0.0,
        }

    def stop(self) -> None:
        """Close what is open. The driver then ends the actor."""
        if self._sender is not None:
            self._sender.close()
        if self._policy is not None:
            self._policy.close()

    @property
    def _ready(self) -> Zero3Policy:
        if self._policy is None:
            raise RuntimeError("setup() comes first")
        return self._policy

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        # Two threads in one process group would mix up its collectives.
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"{what} was called while {self._busy[0] if self._busy else 'another call'} runs")
        self._busy = (what, time.monotonic())
        try:
            yield
        finally:
            self._busy = None
            self._lock.release()


LearnerActor: Any = ray.remote(concurrency_groups={"control": 2})(LearnerRank)  # type: ignore[call-overload]


def actor_environment(device: Literal["cpu", "cuda"], threads: int = 1) -> dict[str, str]:
    """Environment variables of a rank's process, for ``runtime_env``. GPUs are granted by Ray, never by hand."""
    common = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        # Ray shows every GPU to an actor that asked for none.
        return common | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return common | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def use_node_interface() -> None:
    """Point Gloo at the interface that holds this node's address: by itself it resolves the host name, which in
    containers and network namespaces often leads elsewhere. A value that is already set stays."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    wanted = node_address()
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
        if socket.inet_ntoa(answer[20:24]) == wanted:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _load_sending_code() -> None:
    """vllm takes seconds to import. The engines take longer to start than a rank, so that it can be done meanwhile;
    what goes wrong here is raised where the sender is made."""
    with suppress(ImportError):
        importlib.import_module("grpo_dist.weights.sender")
        importlib.import_module("vllm.distributed.weight_transfer.factory")
