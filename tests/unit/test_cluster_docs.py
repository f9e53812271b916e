"""The page about clusters: its example is a valid file, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_dist.submit.plan import make_submission
from grpo_dist.submit.verbs import backend_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def test_every_example_is_rendered(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    assert examples
    for number, text in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        one = make_submission("quickstart", path, ["weights.backend=gloo"], dry_run=True)
        assert backend_of(one.loaded.cluster.backend).render(one)


def test_every_path_it_names_exists() -> None:
    named = set(re.findall(r"`((?:cluster_configs|launch|docker|docs)/[\w./*-]+)`", PAGE))
    assert len(named) > 8
    for name in named:
        assert list(ROOT.glob(name.rstrip("/"))), name
