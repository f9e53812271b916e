"""vLLM's NCCL weight transfer with the faults of the built-in engine closed. Needs CUDA; importing it does not.

Differences from ``vllm.distributed.weight_transfer.nccl_engine`` (all bytes are moved by its code):

* a new group closes the old one first, and a communicator that disabled itself (no libnccl) is an error, not a no-op;
* one packed buffer: with two, a layer whose tensors span two chunks is replayed on the other stream;
* the sender waits for the whole device before it sends: the packing code never waits for the caller's stream;
* a deadline on both sides aborts the communicator, because NCCL has none of its own;
* the checks of ``receiver.py``.

NOT RUN on a GPU so far: read against vLLM 0.32's sources only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from grpo_dist.weights.receiver import CheckedReload

PACKED_BYTES = 512 << 20  # engines need about 3 of these beside gpu_memory_utilization
RECEIVE_SECONDS = 600.0  # when the update does not say


@dataclass
class GrpoNcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    digest: bool = False
    timeout_seconds: float = RECEIVE_SECONDS


class GrpoNcclWeightTransferEngine(CheckedReload, NCCLWeightTransferEngine):
    update_info_cls = GrpoNcclUpdateInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.shutdown()  # a second group over a dead first one fails with "unhandled cuda error"
        super().init_transfer_engine(init_info)
        _require_available(self.model_update_group)

    def receive_weights(self, update_info: GrpoNcclUpdateInfo) -> None:  # type: ignore[override]
        self.expect(update_info.names, update_info.dtype_names, update_info.shapes)
        limit = update_info.timeout_seconds
        with _deadline(self.model_update_group, limit) as expired, self._loads(update_info.digest):
            super().receive_weights(update_info)
            torch.cuda.synchronize()
        if expired.is_set():  # after an abort the received bytes are junk
            self.model_update_group = None
            raise RuntimeError(f"weights did not arrive within {limit:.0f} s")

    @contextmanager
    def _loads(self, digest: bool) -> Iterator[None]:
        """Route the base class's ``model.load_weights`` through ``load``."""
        model, outer = self.model, self

        class Recorder:
            def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
                outer.model = model
                outer.load(pairs, digest=digest)
                outer.model = self  # type: ignore[assignment]

        self.model = Recorder()  # type: ignore[assignment]
        try:
            yield
        finally:
            self.model = model


@dataclass
class GrpoNcclTrainerInitInfo(NCCLTrainerInitInfo):
    backend: ClassVar[str] = "grpo_nccl"


class GrpoNcclTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    init_info_cls = GrpoNcclTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: NCCLTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        torch.cuda.set_device(torch.cuda.current_device())  # this thread is new: it starts on device 0
        engine = super().trainer_init(init_info, client=client, source=source)
        _require_available(engine.model_update_group)
        return engine

    def send_weights(self) -> None:
        torch.cuda.synchronize()
        super().send_weights()


def nccl_init_info(master_address: str, master_port: int, world_size: int) -> GrpoNcclTrainerInitInfo:
    return GrpoNcclTrainerInitInfo(
        master_address=master_address,
        master_port=master_port,
        world_size=world_size,
        packed_buffer_size_bytes=PACKED_BYTES,
        packed_num_buffers=1,
        rank=0,
    )


def _require_available(group: Any) -> None:
    if group is None or not group.available:
        raise RuntimeError("NCCL is not available for the weight group: libnccl could not be loaded in this process")


@contextmanager
def _deadline(group: Any, seconds: float) -> Iterator[threading.Event]:
    """Abort the communicator when the body takes too long; NCCL itself would wait for ever."""
    expired = threading.Event()

    def abort() -> None:
        expired.set()
        if group is not None:
            group.destroy()

    timer = threading.Timer(seconds, abort)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()
