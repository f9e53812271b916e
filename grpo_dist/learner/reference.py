"""The reference policy of the KL term: the model as loaded, under ZeRO-3 like the policy, and how it follows that.

    fixed      stays what was loaded
    refresh    every n steps its shards become the policy's
    ema        every n steps  shard <- (1 - ema) shard + ema x the policy's shard, kept in fp32

Both models are cut into shards alike, so each rank mixes its own shards: no gather, no communication but for the small
parameters that DeepSpeed keeps whole. A reference that moves is part of a checkpoint; any number of ranks can load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from grpo_dist.errors import CheckpointError, UserError
from grpo_dist.learner.ds_checkpoint import TAG, own_shard
from grpo_dist.learner.ds_config import reference_config
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logprobs
from grpo_dist.learner.spec import LearnerSpec


class Reference:
    """This rank's shard of the reference. Every method but ``state`` and ``load`` is collective."""

    def __init__(self, spec: LearnerSpec, device: torch.device) -> None:
        self._spec = spec
        model = load_model(spec.model, device).requires_grad_(False)
        self._head = replace_head(model, spec.temperature, spec.learner.logprob_chunk_tokens)
        self.engine, *_ = deepspeed.initialize(model=model, config=reference_config(spec))
        self.engine.eval()
        if self.moves:
            for name, parameter in self._parameters():
                _refuse_other_copies(name, parameter)
        # Of an average with a small share, bf16 would lose every change.
        self._exact = {n: p.ds_tensor.float() for n, p in self._parameters()} if self._averages else {}

    @property
    def moves(self) -> bool:
        return self._spec.algorithm.kl.every is not None

    @property
    def _averages(self) -> bool:
        return self.moves and self._spec.algorithm.kl.reference == "ema"

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> Tensor:
        """(L,) fp32, 0 off the mask."""
        return token_logprobs(self.engine, self._head, packed, entropy=False)[0]

    def follow(self, policy: torch.nn.Module, step: int) -> None:
        """After step ``step`` of the run: become, or come nearer to, the policy where it is time to."""
        every = self._spec.algorithm.kl.every
        if every is None or step % every:
            return
        theirs: dict[str, Any] = dict(policy.named_parameters())
        for name, mine in self._parameters():
            shard = theirs[name].ds_tensor
            assert shard.shape == mine.ds_tensor.shape, f"{name}: shards of {shard.shape} and {mine.ds_tensor.shape}"
            if self._averages:
                assert self._spec.algorithm.kl.ema is not None
                shard = self._exact[name].lerp_(shard.to(self._exact[name]), self._spec.algorithm.kl.ema)
            mine.ds_tensor.copy_(shard)
        self._renew()

    def state(self) -> dict[str, Tensor] | None:
        """What this rank keeps in a checkpoint; None for a reference that never moves."""
        if not self.moves:
            return None
        kept = self._exact or {name: p.ds_tensor for name, p in self._parameters()}
        return {name: t.detach() for name, t in kept.items()}  # without what DeepSpeed hangs on to a tensor of its own

    def load(self, folder: Path) -> None:
        """What all ranks saved under ``folder``, however many they were. Raises CheckpointError."""
        if not self.moves:
            return
        files = sorted((folder / TAG).glob("reference_*.pt"))
        if not files:
            raise CheckpointError(f"{folder} holds no reference policy ({TAG}/reference_*.pt)")
        parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
        for name, p in self._parameters():
            shard = own_shard([part[name] for part in parts], p.ds_numel, self._spec.rank, len(p.ds_tensor))
            p.ds_tensor[: len(shard)].copy_(shard)
            if self._averages:
                self._exact[name][: len(shard)].copy_(shard)
        self._renew()

    def _parameters(self) -> list[tuple[str, Any]]:
        return list(self.engine.module.named_parameters())

    def _renew(self) -> None:
        """Parameters that are whole now (small ones always are) still hold what they held: gather them anew."""
        whole = [p for _, p in self._parameters() if p.ds_status == ZeroParamStatus.AVAILABLE]
        if whole:
            whole[0].partition(whole)
            whole[0].all_gather(whole)


def _refuse_other_copies(name: str, parameter: Any) -> None:
    if parameter.ds_secondary_tensor is not None or parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme:
        raise UserError(
            f"algorithm.kl.reference cannot move ({name}): with zero_hpz_partition_size, or parameters on NVMe, in "
            "learner.deepspeed a forward pass reads another copy than the shard in memory; set it to fixed"
        )
