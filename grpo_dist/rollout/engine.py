"""One vLLM engine, as the rest of the system sees it. The only importer of vLLM's engine.

    start ─► generate … ─► pause ─► start_update ─► update ─► finish_update(version) ─► resume ─► generate …

Token ids in, token ids out. A group is one request with n = G, so its prompt is computed once. An engine that is in the
middle of an update, or whose update failed, can not be resumed: it holds half of two weight versions.

Left out: which requests to run and when (``pipeline.py``), who sends the weights (``weights/``), Ray (``worker.py``).
vLLM is imported in ``start``, after the environment is set, so that importing this module is cheap.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from grpo_dist.config import EvalSampling, ModelSection, RolloutSection, TrainSampling
from grpo_dist.errors import PublicationError
from grpo_dist.types import Completion, FinishReason, VersionSpan
from grpo_dist.weights.plugin import BACKENDS

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_KV_CACHE_BYTES = 512 << 20
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
# What a model folder's generation_config.json may say about sampling; none of it is used.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How completions are drawn. The defaults are the model's own distribution, which training rollouts need."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # completions of a known length, for benchmarks

    @classmethod
    def of(cls, section: TrainSampling | EvalSampling, train: TrainSampling | None = None) -> SamplingSpec:
        """From a section of the recipe. Evaluation takes what it does not say itself from ``train``."""
        if isinstance(section, TrainSampling):
            return cls(
                section.max_tokens, section.temperature, section.top_p, section.top_k, section.min_p, section.stop
            )
        if train is None:
            raise ValueError("evaluation sampling needs the training sampling for max_tokens and stop")
        limit = section.max_tokens or train.max_tokens
        return cls(limit, section.temperature, section.top_p, stop=train.stop)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine is started with. Picklable: the driver makes it, the actor uses it."""

    model: ModelSection
    rollout: RolloutSection
    context_tokens: int  # longest prompt + longest completion, training and evaluation
    seed: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"  # of weight transfer
    device: Literal["cpu", "cuda"] = "cpu"
    version: int = 0  # of the weights in the model folder
    extra: dict[str, Any] = field(default_factory=dict)  # more engine arguments, for tests and benchmarks

    def environment(self) -> dict[str, str]:
        """Of the actor, before vLLM is imported; its child processes inherit it."""
        share = int(self.rollout.placement.cpus / self.rollout.tensor_parallel)
        threads = self.rollout.threads or max(1, share)
        shared = {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": "/tmp",  # socket paths have a limit of 107 characters: a long TMPDIR breaks them
            "VLLM_NO_USAGE_STATS": "1",
            # vLLM warns of what is missing for speed on CPUs, ten lines per process: nothing a user of ours can act on.
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if self.device == "cpu" else "WARNING"),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads),
        }
        if self.device == "cpu":
            # By default an engine pins itself to cores; several engines on a machine would take the same ones.
            return shared | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        return shared | {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not eligible with processed_logprobs; its kernels want a download
        }

    def arguments(self) -> dict[str, Any]:
        """For vLLM's AsyncEngineArgs, but for ``weight_transfer_config``. ``rollout.engine`` goes over the defaults."""
        if self.device == "cpu":
            defaults: dict[str, Any] = {
                "enforce_eager": True,
                "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,  # with an explicit size and eager mode no warm-up runs
                "max_num_seqs": 256,
                # A prompt that is computed in two parts makes the CPU runner rewind a seeded generator, which a CPU
                # generator cannot do: the engine dies ("CPU Generator does not use offset").
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(8192, self.context_tokens, self.rollout.engine.get("max_model_len", 0)),
            }
        else:
            defaults = {"gpu_memory_utilization": 0.85, "disable_cascade_attn": True}
            if self.model.dtype != "float32":  # the head in fp32 removes most of the mismatch with the learner
                defaults["hf_overrides"] = {"head_dtype": "float32"}
        owned = {
            "model": self.model.path,
            "dtype": self.model.dtype,
            "trust_remote_code": self.model.trust_remote_code,
            "seed": self.seed,
            "tensor_parallel_size": self.rollout.tensor_parallel,
            # Left alone, vLLM takes its Ray executor inside a placement group and then refuses the bundle.
            "distributed_executor_backend": "uni" if self.rollout.tensor_parallel == 1 else "mp",
            "logprobs_mode": "processed_logprobs",  # after temperature: the learner divides its logits too
            "generation_config": "vllm",  # the model folder's sampling defaults would change the distribution
            "worker_extension_cls": "grpo_dist.weights.receiver.WorkerExtension",
            "disable_log_stats": True,
        }
        return defaults | {"max_model_len": self.context_tokens} | self.rollout.engine | self.extra | owned


class Engine:
    """Async; every method runs on the event loop that called ``start``: vLLM's sockets belong to that loop."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.version = settings.version
        self._context = settings.rollout.engine.get("max_model_len", settings.context_tokens)
        self._llm: AsyncLLM | None = None
        self._tokenizer: Any = None
        self._state: Literal["ready", "updating", "broken"] = "ready"
        self._paused_at: float | None = None

    async def start(self) -> None:
        """Start the engine's processes and compile what the first step would otherwise wait for. 15-60 s."""
        os.environ.update(self.settings.environment())
        os.environ.pop("VLLM_PORT", None)  # a number makes all engines scan from it, a URI (Kubernetes) raises
        if self.settings.device == "cuda":
            _check_visible_devices(self.settings.rollout.tensor_parallel)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = WeightTransferConfig(backend=BACKENDS[self.settings.backend])
        arguments = AsyncEngineArgs(**self.settings.arguments(), weight_transfer_config=transfer)
        self._llm = AsyncLLM.from_engine_args(arguments)
        self._tokenizer = self._llm.get_tokenizer()
        await self._llm.update_weight_version(str(self.version))
        # The kernel that gathers log-probabilities is compiled on first use, up to 20 s on a CPU.
        await self.generate((0,), 2, SamplingSpec(max_tokens=2), seed=0)

    @property
    def llm(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError("the engine has not been started")
        return self._llm

    @property
    def dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    def describe(self) -> dict[str, Any]:
        """What the engine really does, for the log and for people."""
        spec = SamplingSpec.of(self.settings.rollout.sampling)
        config = self.llm.vllm_config
        fields = self.llm.input_processor.generation_config_fields
        ignored = {k: v for k, v in fields.items() if k in _SAMPLING_DEFAULTS}
        return {
            "version": self.version,
            "world_size": config.parallel_config.world_size,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "sampling": asdict(spec) | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "stop_token_ids": _stop_token_ids(self._tokenizer, fields),
            "generation_config_ignored": ignored,
        }

    async def generate(self, prompt: tuple[int, ...], n: int, spec: SamplingSpec, seed: int) -> tuple[Completion, ...]:
        """n completions of one prompt, in the order of their seeds (seed + i)."""
        if len(prompt) >= self._context:
            raise ValueError(f"prompt has {len(prompt)} tokens, the engine's context is {self._context}")
        if spec.temperature == 0 and n > 1:  # vLLM refuses n greedy samples; they are equal
            return (await self.generate(prompt, 1, spec, seed)) * n
        request = f"{seed}-{uuid.uuid4().hex[:12]}"  # a group sent again must not meet its former self
        tokens: TokensInput = {"type": "token", "prompt_token_ids": list(prompt)}
        final = None
        async for output in self.llm.generate(tokens, _params(spec, n, seed), request):
            final = output
        if final is None or len(final.outputs) != n:
            raise RuntimeError(f"vLLM returned {0 if final is None else len(final.outputs)} of {n} samples")
        return tuple(self._completion(o) for o in sorted(final.outputs, key=lambda o: o.index))

    def _completion(self, output: CompletionOutput) -> Completion:
        token_ids = tuple(output.token_ids)
        reason = _FINISH_REASONS.get(output.finish_reason or "")
        if reason is None:
            raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}, wanted stop, length or abort")
        return Completion(
            token_ids=token_ids,
            logprobs=_sampled_logprobs(output.logprobs, token_ids),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason=reason,
            versions=tuple(VersionSpan(int(s.version), s.start, s.end) for s in output.weight_versions or ()),
        )

    async def pause(self) -> None:
        """Stop generating; requests are kept and their cache is dropped, so they go on under whatever weights come."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        await self.llm.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> float:
        """Go on generating. Returns how long the engine was paused, in seconds."""
        if self._state != "ready":
            raise PublicationError(f"engine cannot resume: its weight update is {self._state}")
        await self.llm.resume_generation()
        paused = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        self._paused_at = None
        return paused

    async def join_group(self, init_info: dict[str, Any]) -> None:
        """Leave the former weight group and join the one described, closing an update that did not finish."""
        await self._close_update()
        await self.llm.collective_rpc("shutdown_weight_transfer_engine")
        await self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    async def start_update(self) -> None:
        if self._paused_at is None:
            raise PublicationError("engine must be paused before its weights are replaced")
        await self._close_update()
        self._state = "updating"
        await self.llm.start_weight_update()

    async def update(self, update_info: dict[str, Any]) -> None:
        try:
            await self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
        except BaseException:
            self._state = "broken"
            raise

    async def finish_update(self, version: int) -> None:
        if self._state != "updating":
            raise PublicationError(f"no weight update to finish: it is {self._state}")
        self._state = "broken"  # until it is known to be whole
        await self.llm.finish_weight_update(str(version))
        self._state, self.version = "ready", version

    async def _close_update(self) -> None:
        if self._state != "ready":
            await self.llm.collective_rpc("abandon_weight_update")
            self._state = "broken"

    async def received_digests(self) -> list[dict[str, str]]:
        """Per rank of the engine: digests of the last update's tensors, as they arrived."""
        return list(await self.llm.collective_rpc("received_digests"))

    async def checksums(self) -> list[dict[str, str]]:
        """vLLM's own, per rank. On a CPU they see nothing of the packed linear layers."""
        return await self.llm.compute_weight_checksums()

    async def close(self) -> None:
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)


def _params(spec: SamplingSpec, n: int, seed: int) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=n,
        seed=seed,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        max_tokens=spec.max_tokens,
        stop=list(spec.stop) or None,
        ignore_eos=spec.ignore_eos,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(spec.stop),  # only stop strings need text while generating
        output_kind=RequestOutputKind.FINAL_ONLY,  # otherwise samples come one at a time and the last would win
    )


def _sampled_logprobs(flat: Any, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Looked up by token id: a position may hold more tokens than the sampled one, in any order."""
    if flat is None or len(flat) != len(token_ids):
        got = 0 if flat is None else len(flat)
        raise RuntimeError(f"vLLM returned {got} log-probabilities for {len(token_ids)} tokens")
    found = []
    for token, start, end in zip(token_ids, flat.start_indices, flat.end_indices, strict=True):
        found.append(flat.logprobs[flat.token_ids.index(token, start, end)])
    return tuple(found)


def _stop_token_ids(tokenizer: Any, generation_fields: dict[str, Any]) -> list[int]:
    named = generation_fields.get("eos_token_id", [])
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def _check_visible_devices(wanted: int) -> None:
    import torch

    if (seen := torch.cuda.device_count()) != wanted:
        raise RuntimeError(
            f"engine wants exactly {wanted} visible GPUs, sees {seen} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}): was RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES set "
            "before ray start?"
        )
