"""Looks for signs that the policy games its reward: plain functions over scored groups, and warnings from their course.

    watch/audit_gap            reward of the audited samples minus what an audit verifier (`audit: 0.1`) says of them,
                               both as a share of their range; grows when the reward is gamed
    watch/audited              samples that an audit verifier judged this step
    watch/form_share           share of the positive reward that wrong answers earned (format, length, …)
    watch/repetition           share of word 4-grams of a completion that it has said before, mean over completions
    watch/length_drift         mean completion length over that of the first steps
    watch/duplicates           share of completions that are word for word another one of their group

Thresholds warn, once per sign until it is gone; nothing here changes training. Slow verdicts are a sign as well: the
time of one (verify/seconds_p99) close to its limit means that the next ones will be masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_dist.config import VerifierUse
from grpo_dist.errors import GrpoDistError
from grpo_dist.metrics import Mean, Stats, Sum, percentile
from grpo_dist.types import ScoredGroup, Verdict

FIRST_STEPS = 5  # of which lengths and gaps are the yardstick
_SEEN_WORDS = 4000  # of a completion
_SLOW_SHARE = 0.5  # of the time limit

WARN = {"watch/audit_gap": 0.2, "watch/form_share": 0.5, "watch/repetition": 0.5, "watch/length_drift": 3.0}
MEANING = {
    "watch/audit_gap": "the reward is {value:.2f} higher than the audit verifiers say: it may be gamed",
    "watch/form_share": "{value:.0%} of the reward goes to wrong answers: gate it with `requires`",
    "watch/repetition": "completions repeat themselves ({value:.0%} of their word 4-grams)",
    "watch/length_drift": "completions are {value:.1f} times as long as at the start",
}


def repetition(text: str, n: int = 4) -> float:
    """Share of word n-grams that came before in the text; 0 for a text too short to have two."""
    words = text.split(maxsplit=_SEEN_WORDS)[:_SEEN_WORDS]
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def watch_metrics(groups: Sequence[ScoredGroup], uses: Sequence[VerifierUse]) -> Stats:
    """The watch/* of one step that need no history."""
    verdicts = [verdict for group in groups for verdict in group.verdicts if verdict.reward is not None]
    texts = [[completion.text for completion in group.rollout.completions] for group in groups]
    total = sum(len(one) for one in texts)
    gaps = _audit_gaps(verdicts, uses)
    positive = [verdict for verdict in verdicts if verdict.reward is not None and verdict.reward > 0]
    earned = sum(verdict.reward or 0.0 for verdict in positive)
    return {
        "watch/audit_gap": Mean(sum(gaps), len(gaps)),
        "watch/audited": Sum(len(gaps)),
        "watch/form_share": Mean(sum(v.reward or 0.0 for v in positive if v.correct is False), earned),
        "watch/repetition": Mean(sum(repetition(text) for one in texts for text in one), total),
        "watch/duplicates": Mean(sum(len(one) - len(set(one)) for one in texts), total),
    }


def _audit_gaps(verdicts: Sequence[Verdict], uses: Sequence[VerifierUse]) -> list[float]:
    audits = {use.label or use.name for use in uses if use.audit is not None}
    scale = sum(abs(use.weight) for use in uses if use.audit is None) or 1.0
    gaps = []
    for verdict in verdicts:
        said = [value for label, value in verdict.parts.items() if label in audits]
        if said and verdict.reward is not None:
            gaps.append(verdict.reward / scale - sum(said) / len(said))
    return gaps


def refuse_errors(groups: Sequence[ScoredGroup], limit: float, step: int) -> None:
    """Raises GrpoDistError, with the first cause, when more than this share of a step's verdicts failed."""
    failed = [(g, i) for g in groups for i, verdict in enumerate(g.verdicts) if verdict.reward is None]
    total = sum(len(group.verdicts) for group in groups)
    if len(failed) <= limit * total:
        return
    group, index = failed[0]
    raise GrpoDistError(
        f"{len(failed)} of {total} verdicts of step {step} failed, more than verifiers.max_error_rate = {limit}; "
        f"the first ({group.rollout.prompt.id}/{index}): {group.verdicts[index].error}"
    )


@dataclass(slots=True)
class Watch:
    """The course of these numbers over a run. ``look`` once per step."""

    uses: Sequence[VerifierUse]
    lengths: list[float] = field(default_factory=list)  # of the first steps
    timeout: float = math.inf  # seconds that one verdict may take
    warned: set[str] = field(default_factory=set)

    def look(self, groups: Sequence[ScoredGroup]) -> tuple[dict[str, float], list[str]]:
        """(watch/* values of this step, warnings that are due)."""
        stats = watch_metrics(groups, self.uses)
        values = {name: float(stat.value) for name, stat in stats.items() if not stat.empty}
        lengths = [len(completion.token_ids) for group in groups for completion in group.rollout.completions]
        if lengths:
            mean = sum(lengths) / len(lengths)
            if len(self.lengths) < FIRST_STEPS:
                self.lengths.append(mean)
            values["watch/length_drift"] = mean / max(sum(self.lengths) / len(self.lengths), 1.0)
        high = {name for name, limit in WARN.items() if values.get(name, 0.0) > limit}
        texts = {name: MEANING[name].format(value=values[name]) for name in high}
        if slow := slow_verdicts(groups, self.timeout):
            texts["slow verdicts"] = slow
        due = [texts[name] for name in sorted(set(texts) - self.warned)]
        self.warned = set(texts)
        return values, due


def slow_verdicts(groups: Sequence[ScoredGroup], timeout: float) -> str | None:
    """What to say when one verdict in a hundred takes more than half of what it may; names the slowest."""
    times = sorted(
        (verdict.seconds, f"{group.rollout.prompt.id}/{index}")
        for group in groups
        for index, verdict in enumerate(group.verdicts)
    )
    if not times:
        return None
    p50, p99 = (percentile([seconds for seconds, _ in times], q) for q in (0.5, 0.99))
    if p99 <= _SLOW_SHARE * timeout:
        return None
    slowest = ", ".join(f"{name} ({seconds:.2g} s)" for seconds, name in reversed(times[-3:]))
    return (
        f"verdicts take up to the limit: p50 {p50:.2g} s, p99 {p99:.2g} s of verifiers.timeout {timeout:g} s; "
        f"the slowest: {slowest}"
    )
