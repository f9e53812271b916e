"""Everything a run holds between two steps, opened and closed as one: fleet, records, tracker, durable state.

    Run.open ─► folder, prompts, newest good checkpoint      (nothing started yet: bad input ends here)
             ─► Ray, fit, learner ranks + engines + verifiers (started at the same time)
             ─► restored learner, tracker, display
    Run.close ─► workers asked to stop, then ended; tracker closed; Ray let go if it was started here

``train.py`` is the order of the steps; this file is what each of its verbs means.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from grpo_dist.config import Recipe
from grpo_dist.data.prompts import PromptStream
from grpo_dist.errors import GrpoDistError, Interrupted, SelfCheckError, UserError, WorkerLost
from grpo_dist.evaluate import evaluate
from grpo_dist.fleet.cluster import Cluster, cluster
from grpo_dist.fleet.fleet import Fleet
from grpo_dist.learner.checkpoint import CheckpointStore
from grpo_dist.metrics import Stats, batch_metrics, merge_stats, rollout_metrics, stat_values
from grpo_dist.model_folder import load_inputs
from grpo_dist.monitor.advice import Advisor
from grpo_dist.monitor.console import Console, open_console
from grpo_dist.monitor.records import RunFolder, last_step, read_jsonl
from grpo_dist.monitor.tracking import Tracker, open_tracker
from grpo_dist.rollout.pipeline import RolloutPipeline
from grpo_dist.rollout.selection import Difficulty, StepGroups, select
from grpo_dist.signals import STOP_SIGNALS, StopSignals
from grpo_dist.step_clock import StepClock, weight_metrics
from grpo_dist.types import RunState, Sample, ScoredGroup, TrainBatch, WeightUpdate
from grpo_dist.verifiers.watch import FIRST_STEPS, Watch, refuse_errors


class Run:
    """A run that is open. Made by ``Run.open``."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, prompts: PromptStream, state: RunState, store: CheckpointStore
    ) -> None:
        self.recipe, self.folder, self.prompts, self.state, self.store = recipe, folder, prompts, state, store
        self.fleet: Fleet
        self.tracker: Tracker
        self.console: Console
        self.clock = StepClock()
        self._saved_step: int | None = state.step if state.step else None
        self._learner_clean = True  # the learner holds exactly state.step: False from an update's start to its commit
        self._stop = StopSignals()
        self._unrecorded: tuple[StepGroups, Sequence[Sample], Sequence[TrainBatch], Stats] | None = None
        # Until the first update, samples and learner have the same weights; groups of a former process may be older.
        self._fresh_weights = not state.buffered
        self._advisor = Advisor()
        lengths = (row.get("rollout/completion_tokens_mean") for row in read_jsonl(folder.path / "metrics.jsonl"))
        self._difficulty = Difficulty(
            recipe.algorithm.filters.difficulty, prompts.place, len(prompts), state.difficulty
        )
        self._remembered: dict[str, float] = {}  # metrics of the difficulty memory after the step at hand
        first_lengths = [n for n in islice(lengths, FIRST_STEPS) if n is not None]
        self._watch = Watch(recipe.verifiers.use, first_lengths, recipe.verifiers.timeout)

    # --- opening and closing ----------------------------------------------------------------------------------------

    @classmethod
    @asynccontextmanager
    async def open(cls, recipe: Recipe) -> AsyncIterator[Run]:
        """Open everything, or raise one clear error with nothing left behind.

        Raises:
            UserError: bad input, a folder of another run, a cluster that is too small.
            WorkerLost: a worker did not become ready.
        """
        async with AsyncExitStack() as stack:
            model, prompts = load_inputs(recipe)
            folder = stack.enter_context(RunFolder.open(recipe))
            store = CheckpointStore(folder.checkpoints, recipe.checkpoint.keep)
            state, checkpoint = _restore(recipe, folder, store, prompts)
            run = cls(recipe, folder, prompts, state, store)
            run.console = stack.enter_context(open_console(recipe, state.step))
            here = stack.enter_context(cluster())
            # After Ray's start, which installs handlers of its own.
            stack.enter_context(
                run._stop.heard(run.console.say, lambda: f"the last checkpoint is step {run._saved_step}")
            )
            with run._stop.ending_a_start():
                await run._start_fleet(stack, here, model, checkpoint)
            run.tracker = open_tracker(
                recipe,
                folder.path,
                run_id=state.wandb_id,
                resumed_step=state.step if recipe.run.resume else None,
                warn=run.warn,
            )
            stack.push_async_exit(run._close_tracker)
            run.state = replace(state, wandb_id=run.tracker.run_id, prompts=prompts.fingerprint)
            yield run

    async def _start_fleet(self, stack: AsyncExitStack, here: Cluster, model: str, checkpoint: Path | None) -> None:
        self.console.waiting("workers to start")
        self.fleet = await Fleet.start(self.recipe, model, here, event=self.folder.append_event, tell=self.console.say)
        stack.push_async_callback(self.fleet.end)
        self.console.say(f"sampling: {self.fleet.effective_sampling()}")
        if isolation := self.fleet.isolation():
            self.console.say(f"code is run under: {isolation}")
        if checkpoint is not None:
            self.console.waiting(f"the learner to load {checkpoint.name}")
            await self.fleet.learner.load(checkpoint)
            self.folder.append_event("resumed", step=self.state.step, checkpoint=str(checkpoint))

    async def _close_tracker(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and not issubclass(kind, Interrupted)
        await asyncio.to_thread(self.tracker.close, 1 if failed else 0)  # up to half a minute: signals are still heard

    # --- verbs of the loop ------------------------------------------------------------------------------------------

    def remaining_steps(self) -> range:
        return range(self.state.step + 1, self.recipe.run.steps + 1)

    def pipeline(self) -> RolloutPipeline:
        """The rollout window, filled with what the checkpoint held and never reaching beyond the last step."""
        per_step = self.recipe.rollout.groups_per_step
        self.clock = StepClock()  # the first step's time does not begin before its rollouts may
        return RolloutPipeline(
            self.prompts.request,
            self.fleet.generate,
            self.fleet.score,
            slots=(self.recipe.rollout.max_staleness + 1) * per_step,
            first=self.state.next_group,
            most=per_step * len(self.remaining_steps()),
            buffered=self.state.buffered,
            rests=self._difficulty.rests if self._difficulty.on else None,
            decided=self.state.decided,
            resting=self.state.resting,
        )

    async def take(self, pipeline: RolloutPipeline) -> StepGroups:
        """The groups of the next step: filtered, and refilled where the recipe asks for it.

        Raises:
            GrpoDistError: too many verdicts failed, or refilling found nothing to learn from.
        """
        wanted = self.recipe.rollout.groups_per_step
        self.console.waiting("rollouts", lambda: _window_text(pipeline))

        def look(seen: Sequence[ScoredGroup], trained: int) -> None:
            refuse_errors(seen, self.recipe.verifiers.max_error_rate, self.state.step + 1)
            if self.recipe.algorithm.filters.zero_variance == "refill" and trained < wanted:
                self.console.waiting(
                    f"more rollouts: {trained} of {wanted} groups have spread", lambda: _window_text(pipeline)
                )

        return await select(pipeline, self.recipe.rollout, self.recipe.algorithm.filters, look)

    async def learn(self, batches: Sequence[TrainBatch]) -> Stats:
        """One optimizer update per batch.

        Raises:
            SelfCheckError: engines and learner disagree while they hold the same weights.
            GrpoDistError: too many updates in a row without a finite gradient.
        """
        self.console.waiting("the learner")
        self._learner_clean = False
        with self.clock.phase("learn"):
            learned = await self.fleet.learner.update(batches)
        values = stat_values(learned)
        limit = self.recipe.algorithm.max_step0_mismatch
        if self._fresh_weights and not (off := values.get("mismatch/logprob_abs_mean", 0.0)) <= limit:  # NaN is none
            raise SelfCheckError(
                "start-up self-check 'step 0' failed: engines and learner hold the same weights, but their "
                f"log-probabilities of the sampled tokens differ by {off:.3g} on average, allowed {limit:g} "
                "(algorithm.max_step0_mismatch): look at model.dtype, model.attention, rollout.engine and the sampling "
                "temperature"
            )
        self._fresh_weights = False
        if skipped := int(values["train/skipped"]):
            what = f"{skipped} of {len(batches)} updates of step" if len(batches) > 1 else "step"
            self.warn(f"{what} {self.state.step + 1} skipped: no finite gradient, or nothing to train on")
        if (row := int(values["train/skipped_in_a_row"])) >= self.recipe.faults.nonfinite_steps:
            why = "no finite gradient"
            if not any(batch.loss_tokens for batch in batches):
                why = (
                    "nothing was left to train on: in every group all rewards are equal "
                    "(algorithm.filters.zero_variance: drop), or completions are masked or have no verdict"
                )
            raise GrpoDistError(
                f"{row} optimizer updates in a row were skipped, {why} (faults.nonfinite_steps = "
                f"{self.recipe.faults.nonfinite_steps})"
            )
        return learned

    def commit(
        self, step: int, groups: StepGroups, samples: Sequence[Sample], batches: Sequence[TrainBatch], learned: Stats
    ) -> None:
        """From here on the step counts: its groups are never trained again."""
        self._learner_clean = True
        self._unrecorded = groups, samples, batches, learned
        self._remembered = self._difficulty.observe(groups.seen)
        self.state = replace(
            self.state,
            step=step,
            next_group=groups.seen[-1].group_id + 1,
            samples_trained=self.state.samples_trained + sum(b.loss_sequences for b in batches),
            tokens_trained=self.state.tokens_trained + sum(b.loss_tokens for b in batches),
            seconds=self.state.seconds + self.clock.seconds,
            buffered=(),
        )

    async def publish_first(self) -> None:
        """The publication that every start begins with. Unless a checkpoint was loaded, engines and learner have read
        the same folder, so the engines' own checksums must stay as they were: names, fusion, shards and types all fit.

        Raises:
            SelfCheckError: an engine holds other weights after it.
        """
        before = await self.fleet.checksums()
        await self.publish()
        after = await self.fleet.checksums()
        if self.state.step == 0 and (wrong := sorted(name for name in before if before[name] != after[name])):
            raise SelfCheckError(
                "start-up self-check 'first publication' failed: publishing unchanged weights changed the weights of "
                f"{', '.join(wrong)}: the learner's tensors do not land in the engine as its own loader puts them "
                "(names, fusion, shards or types)"
            )

    async def publish(self) -> WeightUpdate:
        """The learner's weights, as version ``state.step``, to every engine."""
        self.console.waiting(f"version {self.state.step} to reach the engines")
        with self.clock.phase("publish"):
            sent = await self.fleet.publish(self.state.step)
        self.folder.append_event("published", version=sent.version, engines=sent.engines, digest=sent.digest)
        return sent

    def record(self, sent: WeightUpdate | None, pipeline: RolloutPipeline) -> None:
        """Everything known of the committed step, to the run folder, the tracker and the display.

        ``sent`` is None when its weights did not reach the engines: what was trained is on record all the same.
        """
        assert self._unrecorded is not None, "record() once per commit()"
        groups, samples, batches, learned = self._unrecorded
        self._unrecorded = None
        step = self.state.step
        rollouts = rollout_metrics(groups.seen, step - 1)
        values = stat_values(merge_stats([rollouts, *map(batch_metrics, batches), learned]))
        watched, alarms = self._watch.look(groups.seen)
        values |= self.clock.metrics(pipeline.times(), values) | self.fleet.sizes() | watched
        values |= groups.metrics() | self._remembered
        if sent is not None:
            values |= weight_metrics(sent)
        self.folder.write_rollouts(step, groups.seen, samples, groups.dropped)
        if groups.dropped:
            self.folder.append_event("group_dropped", step=step, groups=groups.dropped)
        self.folder.append_metrics(step, values)
        self.tracker.log(step, values)
        self.console.step(step, values)
        for text in [*self._advisor.look(values), *alarms]:
            self.warn(text)
            self.tracker.alert(step, text)
        self.clock = StepClock()  # a step's time begins where the former one's was recorded

    async def maybe_evaluate(self, *, force: bool = False) -> None:
        """pass@1 and pass@k on the held-out prompts: at the start, every evaluate.every steps, and at the end."""
        every, step = self.recipe.evaluate.every, self.state.step
        due = force or step == self.recipe.run.steps or (every > 0 and step % every == 0)
        if not (due and self.prompts.evaluation):
            return
        if self.folder.has_eval(step):  # of the process that this run goes on from
            return
        self.console.waiting("the evaluation")
        sampling = self.recipe.evaluate.sampling
        with self.clock.phase("evaluate"):
            result = await evaluate(
                self.prompts.evaluation, self.fleet.generate_eval, self.fleet.score,
                samples=sampling.samples, seed=self.recipe.run.seed,
            )  # fmt: skip
        values, rows = result.values(), result.rows(self.recipe.tracking.tables)
        self.folder.append_eval(step, values)
        self.tracker.log(step, values)
        if rows:
            self.tracker.table("eval/samples", step, list(rows[0]), [list(row.values()) for row in rows])
        self.console.evaluated(step, values)

    async def maybe_save(self, pipeline: RolloutPipeline) -> None:
        """Every checkpoint.every steps, at the end, and when asked to stop."""
        every, step = self.recipe.checkpoint.every, self.state.step
        if step == self.recipe.run.steps or self._stop.received is not None or (every > 0 and step % every == 0):
            with self.clock.phase("save"):
                await self.save(pipeline)

    async def save(self, pipeline: RolloutPipeline) -> None:
        """A complete checkpoint of this step, or CheckpointError and the older ones untouched."""
        if self._saved_step == self.state.step:
            return
        self.console.waiting(f"checkpoint {self.state.step}")
        state = replace(
            self.state, buffered=pipeline.finished(), decided=pipeline.decided,
            resting=pipeline.resting(self.state.next_group), difficulty=self._difficulty.to_json(),
        )  # fmt: skip
        aside = self.store.begin(state.step)
        try:
            await self.fleet.learner.save(aside)
        except GrpoDistError:
            self.store.abort(aside)
            raise
        # Hashing and syncing many gigabytes must not keep the loop from answering engines and signals.
        path = await asyncio.to_thread(self.store.commit, aside, state)
        self._saved_step = state.step
        self.folder.append_event("checkpoint_saved", step=state.step, path=str(path))

    @asynccontextmanager
    async def saving_on_failure(self, pipeline: RolloutPipeline) -> AsyncIterator[None]:
        """When a worker is lost or a check fails: save the last finished step, if the learner still holds just that."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as failure:
            try:
                await self._after_failure(failure, pipeline)
            except Exception as second:  # the first failure is the one to be told, whatever saving runs into
                self.console.say(f"warning: step {self.state.step} could not be saved after the failure: {second}")
            raise

    async def _after_failure(self, failure: Exception, pipeline: RolloutPipeline) -> None:
        if self._unrecorded is not None:
            self.record(None, pipeline)
        role = getattr(failure, "role", None)
        if self._learner_clean and self.state.step and role != "learner":
            await self.save(pipeline)
        step, name = self.state.step, type(failure).__name__
        self.folder.append_event("failed", step=step, error=str(failure), kind_of_error=name)
        if isinstance(failure, WorkerLost):
            noun = "engine" if role == "rollout" else role
            self.folder.append_event(f"{noun}_lost", worker=failure.name, why=failure.why)

    def stop_if_asked(self) -> None:
        """Raises Interrupted once the step is saved."""
        if (received := self._stop.received) is not None:
            assert self._saved_step == self.state.step or self.state.step == 0
            self.folder.append_event("stopped", step=self.state.step, signal=received.name)
            raise Interrupted(
                f"stopped by {received.name} after step {self.state.step}{', saved' if self.state.step else ''}; "
                f"go on with: grpo-dist train {self.folder.path / 'recipe.yaml'} --resume",
                exit_code=STOP_SIGNALS[received],
            )

    def warn(self, text: str) -> None:
        self.folder.append_event("warning", text=text)
        self.console.say(f"warning: {text}")


def reached_step(recipe: Recipe) -> int:
    """The step that this run's records and newest checkpoint have both reached; 0 without them. Verifies nothing."""
    candidates = CheckpointStore(recipe.run_dir / "checkpoints", recipe.checkpoint.keep).candidates()
    saved = int(candidates[0].name.split(".")[0]) if candidates else 0
    return min(saved, last_step(recipe.run_dir / "metrics.jsonl") or 0)


def _restore(
    recipe: Recipe, folder: RunFolder, store: CheckpointStore, prompts: PromptStream
) -> tuple[RunState, Path | None]:
    """The state to start from: the newest good checkpoint when resuming, else a fresh one."""
    if not recipe.run.resume:
        return RunState(), None
    path, state, refused, _ = store.newest_good()
    for reason in refused:
        folder.append_event("checkpoint_refused", reason=reason)
        print(f"checkpoint refused: {reason}")
    if path is not None and state.prompts != prompts.fingerprint:
        raise UserError(
            f"the training prompts are not those of checkpoint {path}: "
            f"{', '.join(source.source for source in recipe.data.sources)}, or a key of the section data, has changed, "
            "so the place in the data that the checkpoint holds means nothing; start a run of another name"
        )
    folder.truncate(state.step)
    return state, path


def _window_text(pipeline: RolloutPipeline) -> str:
    now = pipeline.status
    return f"{now.generating} groups generating, {now.scoring} in verification, {now.ready} ready"
