"""Signs of reward hacking, on groups made by hand; and audit verifiers, which watch without training."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config import VerifierUse
from grpo_dist.errors import GrpoDistError
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict, VerifyItem
from grpo_dist.verifiers.registry import build
from grpo_dist.verifiers.watch import Watch, refuse_errors, repetition, watch_metrics

USES = [VerifierUse(name="format"), VerifierUse(name="numeric", audit=0.5)]


def group(*samples: tuple[str, Verdict], tokens: int = 10) -> ScoredGroup:
    completions = tuple(Completion((1,) * tokens, (0.0,) * tokens, text, "stop", ()) for text, _ in samples)
    rollout = RolloutGroup(GroupRequest(0, 0, Prompt("p", (1,), "?", 1), 0), completions, 0.0, "e")
    return ScoredGroup(rollout, tuple(verdict for _, verdict in samples))


def values(groups: list[ScoredGroup], uses: list[VerifierUse] = USES) -> dict[str, float]:
    return {name: stat.value for name, stat in watch_metrics(groups, uses).items() if not stat.empty}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("one two three four", 0), ("a b c d e f g h", 0), ("a " * 8, 1 - 1 / 5), ("x " * 1_000_000, 1 - 1 / 3997)],
)  # fmt: skip
def test_repetition(text: str, expected: float) -> None:
    assert repetition(text) == pytest.approx(expected)


def test_audit_gap_and_form_share() -> None:
    verdicts = [
        ("a", Verdict(1.0, None, {"format": 1.0, "numeric": 0.0})),
        ("b", Verdict(1.0, None, {"format": 1.0, "numeric": 1.0})),
        ("c", Verdict(1.0, None, {"format": 1.0})),
        ("a", Verdict(None, error="x")),
    ]
    found = values([group(*verdicts)])
    assert found["watch/audit_gap"] == pytest.approx(0.5)
    assert found["watch/audited"] == 2
    assert found["watch/duplicates"] == pytest.approx(1 / 4)
    wrong = group(
        ("a", Verdict(0.2, False)), ("b", Verdict(1.2, True)), ("c", Verdict(-1.0, False)), ("d", Verdict(0.0, False))
    )
    assert values([wrong])["watch/form_share"] == pytest.approx(0.2 / 1.4)
    assert "watch/form_share" not in values([group(("a", Verdict(0.0, False)))])


def test_warnings_come_once_until_the_sign_is_gone() -> None:
    watch = Watch(USES)
    good, long = group(("a", Verdict(1.0, True))), group(("a", Verdict(1.0, True)), tokens=100)
    looped = group(("x " * 50, Verdict(1.0, True)))
    for _ in range(5):
        seen, due = watch.look([good])
        assert due == []
        assert seen["watch/length_drift"] == 1.0
    seen, due = watch.look([long])
    assert seen["watch/length_drift"] == 10.0
    assert due == ["completions are 10.0 times as long as at the start"]
    assert watch.look([long])[1] == []
    assert watch.look([looped])[1] == ["completions repeat themselves (98% of their word 4-grams)"]
    assert len(watch.look([long])[1]) == 1
    assert watch.look([])[1] == []


def test_each_sign_warns_in_words_that_say_what_to_do() -> None:
    gamed = group(("a", Verdict(1.0, False, {"format": 1.0, "numeric": 0.0})))
    assert Watch(USES).look([gamed])[1] == [
        "the reward is 1.00 higher than the audit verifiers say: it may be gamed",
        "100% of the reward goes to wrong answers: gate it with `requires`",
    ]


@pytest.mark.parametrize(
    ("failed", "limit", "stops"), [(0, 0.0, False), (1, 0.0, True), (2, 0.5, False), (3, 0.5, True)]
)
def test_a_step_with_too_many_errors_stops_with_the_first_cause(failed: int, limit: float, stops: bool) -> None:
    bad = [("a", Verdict(None, error=f"OSError: disk {i}")) for i in range(failed)]
    groups = [group(*[("a", Verdict(0.0, False))] * (4 - failed), *bad)]
    if stops:
        with pytest.raises(GrpoDistError) as error:
            refuse_errors(groups, limit, 7)
        assert str(error.value) == (
            f"{failed} of 4 verdicts of step 7 failed, more than verifiers.max_error_rate = {limit}; "
            f"the first (p/{4 - failed}): OSError: disk 0"
        )
    else:
        refuse_errors(groups, limit, 7)


def test_slow_verdicts_are_named() -> None:
    quick = [("a", Verdict(1.0, True, seconds=0.01))] * 99
    slow = [("a", Verdict(1.0, True, seconds=3.0)), ("a", Verdict(None, error="x", seconds=4.0, timed_out=True))]
    watch = Watch(USES, timeout=4.0)
    assert watch.look([group(*quick)])[1] == []
    assert watch.look([group(*quick, *slow)])[1] == [
        "verdicts take up to the limit: p50 0.01 s, p99 3 s of verifiers.timeout 4 s; "
        "the slowest: p/100 (4 s), p/99 (3 s), p/98 (0.01 s)"
    ]
    assert watch.look([group(*quick, *slow)])[1] == []
    assert watch.look([])[1] == []


def test_an_audit_does_not_change_the_reward() -> None:
    audited = build([VerifierUse(name="exact"), VerifierUse(name="numeric", audit=1.0)])
    verdict = audited.judge(VerifyItem("x", "?", r"\boxed{4}", "stop", "4"))
    assert (verdict.reward, verdict.correct, verdict.parts) == (0.0, False, {"exact": 0.0, "numeric": 1.0})
    failing = audited.judge(VerifyItem("x", "?", "Paris", "stop", "Paris"))
    assert (failing.reward, failing.parts, failing.error) == (1.0, {"exact": 1.0}, None)


def test_an_audit_takes_its_share_the_same_each_time() -> None:
    some = build([VerifierUse(name="exact"), VerifierUse(name="numeric", audit=0.25)])

    def drawn() -> list[bool]:
        return ["numeric" in some.judge(VerifyItem(f"p{i}/0", "?", "4", "stop", "4")).parts for i in range(2000)]

    first: list[Any] = drawn()
    assert drawn() == first
    assert 400 < sum(first) < 600
