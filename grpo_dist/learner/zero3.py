"""One rank of the learner: policy and AdamW under DeepSpeed ZeRO-3, and an optional reference (reference.py).

    update   for each mini-batch, for each micro-batch of it: [reference forward] -> policy forward -> loss -> backward
             after the last micro-batch: clip and step;  after the last mini-batch: [reference follows]
    stage    shards -> full tensors in rank 0's host memory (weights/source.py)
    save     shards and random state of this rank, into a folder that the driver commits (checkpoint.py)

Every public method but ``learning_rate`` is collective: all ranks call it, in the same order, with equally many
micro-batches. DeepSpeed averages gradients over ranks; the loss is a sum over a *global* count, so each rank multiplies
its part by the number of ranks. Whether that gives the gradient it should is measured at every start (``self_check``).

Left out: who calls (rank.py), which checkpoint is good (checkpoint.py), how engines get the weights (weights/).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from grpo_dist.algorithms.objective import LossInputs, policy_loss
from grpo_dist.config import AlgorithmSection
from grpo_dist.errors import UserError
from grpo_dist.learner import ds_checkpoint, self_check
from grpo_dist.learner.ds_config import policy_config
from grpo_dist.learner.export import export_folder
from grpo_dist.learner.lockstep import raise_together
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logits, token_logprobs
from grpo_dist.learner.optimizer import parameter_groups, set_constants
from grpo_dist.learner.reference import Reference
from grpo_dist.learner.spec import LearnerSpec, learning_rate
from grpo_dist.metrics import Max, Stats, merge_stats, merge_updates, stat_values
from grpo_dist.types import FloatArray, MicroBatch, RankBatch, TensorInfo
from grpo_dist.weights.source import ShardedTensor, StagedWeights, ZeroWeightSource

if TYPE_CHECKING:
    from grpo_dist.learner.lora import Adapter, BaseAsReference


def join_group(spec: LearnerSpec) -> None:
    """Join the ranks' process group. Every collective in it has the limit ``spec.collective_seconds``."""
    os.environ.update(
        RANK=str(spec.rank), WORLD_SIZE=str(spec.world), MASTER_ADDR=spec.host, MASTER_PORT=str(spec.port),
        LOCAL_RANK="0",  # Ray shows each actor its own device only; DeepSpeed would otherwise look for MPI
    )  # fmt: skip
    if spec.device == "cuda":
        torch.cuda.set_device(0)
    else:  # would compile at first use, under a lock that a killed rank leaves behind for ever
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=spec.backend,
        timeout=timedelta(seconds=spec.collective_seconds),
        init_method=f"tcp://{spec.host}:{spec.port}",
        rank=spec.rank,
        world_size=spec.world,
    )
    total = torch.ones(1, device=spec.device)
    torch.distributed.all_reduce(total)  # a broken network shows here, before a model is loaded
    assert int(total) == spec.world, f"{int(total)} of {spec.world} ranks answered the first collective"


class Zero3Policy:
    """This rank's shard of the policy. ``step`` counts finished steps of the run, skipped ones included."""

    def __init__(self, spec: LearnerSpec) -> None:
        self.spec, self.step, self.skipped_in_a_row = spec, 0, 0
        self.device = torch.device(spec.device)
        _seed(spec.seed, spec.rank, 0)
        join_group(spec)
        if spec.model.dtype == "float16" and not get_accelerator().is_fp16_supported():
            raise UserError(f"model.dtype float16 is not supported on this {spec.device}: use bfloat16 or float32")
        self._config = policy_config(spec)
        self._hf_config = _hf_config(self._config)  # transformers holds a weak reference: keep it alive
        model = load_model(spec.model, self.device)
        self._adapter = self._add_adapter(model) if spec.learner.lora.rank else None
        self._head = replace_head(model, spec.temperature, spec.learner.logprob_chunk_tokens)
        if spec.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self._optimizer(model), config=self._config)
        self.engine.train()
        # At the smallest scale DeepSpeed would raise; skipped updates are counted, and the run stops by its own rule.
        self.engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        ds_checkpoint.write_in_lockstep(self.engine)
        self._reference = self._make_reference() if spec.algorithm.kl.beta > 0 else None
        self._source = self._weight_source()
        self._touched = False  # an update has run: DeepSpeed can load a checkpoint only before

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        wanted = self.spec.learner.optimizer
        fused = self.device.type == "cuda" and not self.spec.learner.zero.offload_optimizer
        # Fused: one kernel, and no compiler as DeepSpeed's own AdamW needs.
        return torch.optim.AdamW(parameter_groups(model, wanted), lr=self.spec.learner.learning_rate, fused=fused)

    def _add_adapter(self, model: torch.nn.Module) -> Adapter:
        from grpo_dist.learner.lora import add_adapter  # loads peft: only where it is wanted

        return add_adapter(model, self.spec.learner.lora, self.spec.seed)

    def _make_reference(self) -> Reference | BaseAsReference:
        if self._adapter is None:
            return Reference(self.spec, self.device)
        return self._adapter.base_as_reference(self.engine, self._head)

    # --- training ---------------------------------------------------------------------------------------------------

    def update(self, batches: Sequence[RankBatch]) -> Stats:
        """One step of the run: an optimizer update per batch, mostly one. The clip acts from the second on.

        Returns this rank's part of train/* and mismatch/*; merged over ranks they are exact. A gradient that is not
        finite skips its update: weights and optimizer state stay as they are, bit for bit, and ``train/skipped`` counts
        it. So does a batch without a single trained token.
        """
        if not batches or not all(b.micro for b in batches):
            raise ValueError("an update needs at least one micro-batch on every rank (an empty one will do)")
        started, self._touched = time.monotonic(), True
        # The denominator of the ratio, where it is the learner's own: of all batches, before the first update.
        several = len(batches) > 1 and needs_own_logprobs(self.spec.algorithm)
        before = [self.logprobs(b.micro) if several else [None] * len(b.micro) for b in batches]
        updates, longest = [], 0
        for k, (batch, old) in enumerate(zip(batches, before, strict=True), 1):
            rate = learning_rate(self.step + k / len(batches), self.spec.total_steps, self.spec.learner)
            stats, applied = self._update(batch, old, rate)
            self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
            longest = max(longest, self.skipped_in_a_row)
            updates.append((stats, applied))
        self.step += 1
        if self._reference is not None:
            self._reference.follow(self.engine.module, self.step)
        made = sum(applied for _, applied in updates)
        # Of a skipped update among others the loss is no number, and would leave none of theirs.
        trained = [_named("train/", stats) for stats, applied in updates if applied or not made]
        # Engine against learner before the step: the later updates would be measured with a policy that has moved.
        measured = [_named("mismatch/", stats) for stats, _ in (updates if several else updates[:1])]
        counted: Stats = {
            "train/lr": Max(rate),
            "train/updates": Max(made),
            "train/skipped": Max(len(batches) - made),
            "train/skipped_in_a_row": Max(longest),
            "train/update_seconds": Max(time.monotonic() - started),
        }
        return merge_stats([merge_updates(trained), *measured, counted])

    def _update(self, batch: RankBatch, old: Sequence[FloatArray | None], rate: float) -> tuple[Stats, bool]:
        """Statistics, and whether weights were changed."""
        for group in self.engine.optimizer.optimizer.param_groups:
            group["lr"] = rate
        overflows = 0
        while True:
            stats, applied = self._try_update(batch, old)
            if applied or batch.loss_tokens == 0 or not self._scale_was_too_large(stats):
                break
            overflows += 1
        if self.spec.model.dtype == "float16":
            stats |= {"train/loss_scale": Max(self.loss_scale), "train/overflows": Max(overflows)}
        if applied:
            stats["train/grad_norm"] = Max(float(self.engine.get_global_grad_norm() or 0.0))
        return stats, applied

    def _try_update(self, batch: RankBatch, old: Sequence[FloatArray | None]) -> tuple[Stats, bool]:
        parts = []
        for k, (micro, old_logprobs) in enumerate(zip(batch.micro, old, strict=True)):
            self.engine.set_gradient_accumulation_boundary(k == len(batch.micro) - 1)
            parts.append(self._backward(micro, batch.loss_tokens, batch.loss_sequences, old_logprobs))
        if batch.loss_tokens == 0:
            self.engine.optimizer.zero_grad()
            return merge_stats(parts), False
        self.engine.step()
        return merge_stats(parts), bool(self.engine.was_step_applied())

    def _scale_was_too_large(self, stats: Stats) -> bool:
        """Of an update that was not applied: fp16 gradients overflowed although the loss is finite on every rank.

        DeepSpeed has halved its loss scale then, and the same batch is tried again: finding the scale costs no data.
        """
        if self.spec.model.dtype != "float16" or self.loss_scale <= 1:
            return False
        finite = torch.tensor([float(np.isfinite(stat_values(stats).get("train/loss", 0.0)))], device=self.device)
        torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
        return bool(finite)

    @property
    def loss_scale(self) -> float:
        """What DeepSpeed multiplies the loss by: 1 but for fp16."""
        return float(self.engine.optimizer.loss_scaler.cur_scale)

    def _backward(
        self, batch: MicroBatch, loss_tokens: int, loss_sequences: int, old_logprobs: FloatArray | None = None
    ) -> Stats:
        packed = Packed.of(batch, self.device)
        reference = self._reference_logprobs(packed)
        logprobs, entropy = token_logprobs(self.engine, self._head, packed)
        if not self.spec.algorithm.entropy_bonus:
            entropy = entropy.detach()
        if packed.is_empty:
            loss, stats = logprobs.sum() * 0.0, Stats()
        else:
            inputs = LossInputs(
                logprobs=logprobs, advantages=packed.advantages, mask=packed.mask, segment_ids=packed.segment_ids,
                old_logprobs=None if old_logprobs is None else torch.tensor(old_logprobs, device=self.device),
                behavior_logprobs=packed.behavior_logprobs, reference_logprobs=reference, entropy=entropy,
            )  # fmt: skip
            loss, stats = policy_loss(
                inputs, self.spec.algorithm, loss_tokens=loss_tokens, loss_sequences=loss_sequences
            )
        self.engine.backward(loss * self.spec.world, scale_wrt_gas=False)
        return stats

    def _reference_logprobs(self, packed: Packed) -> Tensor | None:
        return None if self._reference is None else self._reference.logprobs(packed)

    @torch.no_grad()
    def logprobs(self, micro: Sequence[MicroBatch]) -> list[FloatArray]:
        """The policy's log-probability of every masked token, (L,) per micro-batch, 0 off the mask."""
        out = []
        for batch in micro:
            packed = Packed.of(batch, self.device)
            values = token_logprobs(self.engine, self._head, packed, entropy=False)[0].cpu().numpy()
            out.append(values[:0] if packed.is_empty else values)
        return out

    def self_check(self) -> dict[str, float]:
        """Packing, head and gradient scale against the plain way, on a few tokens. Raises SelfCheckError."""
        return self_check.run(self)

    @torch.no_grad()
    def plain_logits(self, packed: Packed) -> Tensor:
        """(L, V) logits without our head: for self-checks."""
        return token_logits(self.engine, packed)

    def logprobs_with_gradient(self, packed: Packed) -> Tensor:
        return token_logprobs(self.engine, self._head, packed, entropy=False)[0]

    def smallest_parameter(self) -> torch.nn.Parameter:
        """Of those with a gradient: an adapter's A has none while its B is 0."""
        named = self.engine.module.named_parameters()
        trained = [p for name, p in named if p.requires_grad and ".lora_A." not in name]
        return min(trained, key=lambda p: p.ds_numel)

    def full_gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        """What DeepSpeed has accumulated for a parameter since the last step. Collective."""
        return safe_get_full_grad(parameter)

    # --- weights ----------------------------------------------------------------------------------------------------

    def _weight_source(self) -> ZeroWeightSource:
        tensors = [
            ShardedTensor(TensorInfo(name, str(p.dtype).removeprefix("torch."), tuple(p.ds_shape)), p)
            for name, p in self.engine.module.named_parameters()
        ]
        if self._adapter is not None:
            tensors = self._adapter.published(tensors)
        return ZeroWeightSource(
            tensors, self.gather, gather_bytes=self.spec.learner.zero.gather_bytes,
            main=self.spec.rank == 0, pin=self.device.type == "cuda",
        )  # fmt: skip

    @contextmanager
    def gather(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Full tensors inside, shards again after."""
        with deepspeed.zero.GatheredParameters(list(parameters)):
            self._synchronize()  # DeepSpeed gathers on streams of its own
            yield
            self._synchronize()

    def stage(self, version: int) -> StagedWeights | None:
        """The weights as they are now, complete, in rank 0's host memory; None on other ranks."""
        self._synchronize()
        problem, staged = None, None
        try:
            staged = self._source.stage(version)
        except (RuntimeError, MemoryError, ValueError) as error:
            problem = f"weights could not be staged: {error}"
        raise_together(problem)  # from here no collective is pending: rank 0 may send, the others may go on
        return staged

    def export(self, folder: Path) -> None:
        """A Hugging Face folder with tokenizer, written aside and renamed. Raises CheckpointError."""
        main, also = self.spec.rank == 0, None
        if self._adapter is not None:
            also = self._adapter.writer(self.engine.module, self.gather, main=main, base=self.spec.model.path)
        raise_together(export_folder(folder, self.spec.model, self._source, main=main, also=also))

    # --- durable state ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Shards, optimizer state and random state below ``folder``. Raises CheckpointError, on all ranks alike."""
        extra = {"step": self.step, "random": random_state(), "spec_seed": self.spec.seed}
        state = None if self._reference is None else self._reference.state()
        beside = {} if state is None else {f"reference_{self.spec.rank:05d}.pt": state}
        ds_checkpoint.save(self.engine, folder, extra, beside)

    def load(self, folder: Path) -> None:
        """What ``save`` wrote, by any number of ranks. Only before the first update. Raises CheckpointError."""
        if self._touched:
            raise RuntimeError("DeepSpeed loads a checkpoint into an engine that has not trained yet: start new ranks")
        extra = ds_checkpoint.load(self.engine, folder, rank=self.spec.rank, world=self.spec.world)
        if self._reference is not None:
            self._reference.load(folder)
        self.step = extra["step"]
        if extra["same_world"]:
            restore_random_state(extra["random"])
        else:  # the saved states belong to other ranks
            _seed(self.spec.seed, self.spec.rank, self.step)
        # The recipe's, not the checkpoint's.
        set_constants(self.engine.optimizer.optimizer.param_groups, self.spec.learner.optimizer)

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def needs_own_logprobs(algorithm: AlgorithmSection) -> bool:
    """Whether the loss looks at the learner's log-probabilities of before the step."""
    return algorithm.old_policy == "learner" or (algorithm.kl.beta > 0 and algorithm.kl.place == "reward")


def _named(room: str, stats: Stats) -> Stats:
    return {name: stat for name, stat in stats.items() if name.startswith(room)}


def _hf_config(config: dict[str, Any]) -> Any:
    return HfDeepSpeedConfig(config)  # type: ignore[no-untyped-call]


def _seed(seed: int, rank: int, step: int) -> None:
    """Every random decision of a rank follows from (seed, rank, step)."""
    value = (seed * 1_000_003 + rank * 10_007 + step) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def random_state() -> dict[str, Any]:
    """DeepSpeed saves none."""
    state: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
