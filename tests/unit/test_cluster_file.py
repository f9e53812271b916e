"""Cluster files: every problem with key and line; what a back end cannot do, with its reason; who lives where."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.errors import RecipeError
from grpo_dist.recipe_file import load_recipe
from grpo_dist.submit.cluster import ClusterFile, RolesSection, parse_seconds, parse_size
from grpo_dist.submit.cluster_file import cluster_keys, load_cluster
from grpo_dist.submit.cluster_rules import fit_problems, missing_secrets
from grpo_dist.submit.plan import make_submission, short_name


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_cluster(path)
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


SLURM = "backend: slurm\nroles:\n  head: {on: learner}\n  learner: {nodes: 2, gpus: 8, cpus: 64}\n"


# ---- messages


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("backnd: slurm\n", "1: backnd: unknown key; did you mean backend?"),
        ("backend: slurm\nnamespace: x\n", "2: namespace: unknown key here; it belongs to kubernetes.namespace"),
        (
            "backend: slurm\nroles:\n  learner: {gpu: 8}\n",
            "3: roles.learner.gpu: unknown key; did you mean roles.learner.gpus?",
        ),
        ("backend: slurm\nroles:\n  learner: {memory: 5x}\n", "3: roles.learner.memory: wanted a size such as 64Gi, found '5x'"),
        ("backend: slurm\ntime_limit: tomorrow\n", "2: time_limit: wanted a time such as 90s, 30m, 24h or 2d, found 'tomorrow'"),
        ("backend: slurm\nbackend: ray\n", "2: backend: given twice, first in line 1"),
        ("backend: pbs\n", "1: backend: wanted 'local', 'ray', 'slurm', 'kubernetes', 'ssh', 'skypilot' or 'ray-up', found 'pbs'"),
        ("backend: slurm\nenvironment: {X: 1}\n", "2: environment.X: wanted a valid string, found 1 (write it in quotes)"),
        ("backend: slurm\nenvironment: {HF_TOKEN: abc}\n", "2: environment.HF_TOKEN: looks like a secret; list its name under secrets instead"),
        ("backend: slurm\nimage: a:1\n", "2: image: backend slurm starts no containers (on Slurm: slurm.wrap or slurm.srun)"),
        ("backend: local\nkubernetes: {namespace: x}\n", "2: kubernetes: does not go with backend: local"),
        (SLURM + "  rollout: {nodes: 2, max: 4}\n", "5: roles.rollout.max: backend slurm has a fixed number of nodes; min and max need an autoscaler (kubernetes, ray-up)"),
        (SLURM + "  rollout: {on: verifier}\n  verifier: {on: rollout}\n", "5: roles.rollout.on: leads to no nodes: rollout on verifier on rollout"),
        (SLURM + "  rollout: {on: learner, gpus: 4}\n", "5: roles.rollout.gpus: does not go with on: learner; the nodes are described there"),
        ("backend: slurm\nroles:\n  head: {nodes: 2}\n", "3: roles.head.nodes: must be 1, got 2; put further nodes into another role"),
        (SLURM + "preemption: {notice: 60, grace: 120}\n", "5: preemption.grace: 120 s to save do not fit into the notice of 60 s"),
        ("backend: ray\nstorage: {runs: /r}\n", "ray: missing; wanted ray.address, the dashboard of the cluster"),
        ("backend: ray\nstorage: {runs: /r}\nray: {address: 'ray://h:10001'}\n", "3: ray.address: must be the dashboard's http://HOST:PORT, got 'ray://h:10001'"),
        ("backend: ray\nstorage: {runs: runs}\nray: {address: 'http://h:8265'}\n", "2: storage.runs: must be an absolute path on shared storage, got runs"),
    ],
)  # fmt: skip
def test_one_problem(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in [line.strip() for line in problems(tmp_path, text)]


def test_all_problems_of_a_back_end_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "backend: kubernetes\nimage: grpo\nroles:\n  head: {cpus: 2}\n  rollout: {gpus: 1, cpus: 4, memory: 8Gi, max: 3}\n"
        "kubernetes: {namespace: A_B, queue: {scheduler: kueue, name: q}}\n",
    )
    for key in ("2: image: ", "4: roles.head.memory: ", "5: roles.rollout.max: ", "6: kubernetes.namespace: "):
        assert any(line.startswith(key) for line in found), (key, found)
    assert any("storage.runs" in line for line in found)
    assert any("Kueue admits RayJobs of fixed size" in line for line in found)
    assert any("fixed tag or a digest" in line for line in found)


def test_the_learners_nodes_are_fixed(tmp_path: Path) -> None:
    text = (
        "backend: kubernetes\nimage: a:1\nroles:\n  head: {cpus: 2, memory: 4Gi}\n"
        "  learner: {nodes: 2, max: 3, cpus: 4, memory: 8Gi}\nstorage: {runs: /s/r, volumes: [{claim: c, path: /s}]}\n"
    )
    (line,) = problems(tmp_path, text)
    assert "roles.learner.max: the learner's nodes are fixed" in line


@pytest.mark.parametrize(
    ("image", "fine"),
    [
        ("a", False),
        ("a:latest", False),
        ("host:5000/a", False),
        ("host:5000/a:1", True),
        ("a@sha256:" + "0" * 64, True),
    ],
)
def test_an_image_needs_a_fixed_tag(tmp_path: Path, image: str, fine: bool) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"backend: kubernetes\nimage: {image}\nroles:\n  head: {{cpus: 2, memory: 4Gi}}\n"
        "storage: {runs: /s/r, volumes: [{claim: c, path: /s}]}\n"
    )
    if fine:
        assert load_cluster(path).cluster.image == image
    else:
        assert any("fixed tag" in line for line in problems(tmp_path, path.read_text()))


def test_not_a_mapping_not_yaml_not_there(tmp_path: Path) -> None:
    assert "wanted a mapping" in problems(tmp_path, "- a\n")[0]
    assert "not valid YAML" in problems(tmp_path, "a: [\n")[0]
    with pytest.raises(RecipeError, match="cannot be read"):
        load_cluster(tmp_path / "nope.yaml")


def test_every_key_has_a_description() -> None:
    assert [key for key, text in cluster_keys().items() if not text] == []


# ---- values


def test_sizes_and_times() -> None:
    assert [parse_size(v) for v in ("1", 7, "2Ki", "3 Gi", "4G", "5GiB")] == [1, 7, 2048, 3 << 30, 4 * 10**9, 5 << 30]
    assert [parse_seconds(v) for v in ("90", 30, "90s", "30m", "24h", "2d")] == [90, 30, 90, 1800, 86400, 172800]
    for bad in ("", "-1", "1.5Gi", "Gi", True, 1.5):
        with pytest.raises(ValueError, match="wanted a size"):
            parse_size(bad)


def test_who_lives_where() -> None:
    roles = RolesSection.model_validate(
        {"head": {"on": "learner"}, "learner": {"nodes": 2}, "rollout": {"nodes": 3}, "verifier": {"on": "rollout"}}
    )
    assert [(role, group.count) for role, group in roles.groups()] == [("learner", 2), ("rollout", 3)]
    assert roles.guests("learner") == ["head", "learner"]
    assert roles.guests("rollout") == ["rollout", "verifier"]
    alone = RolesSection()
    assert [role for role, _ in alone.groups()] == ["head"]
    assert alone.guests("head") == ["head", "learner", "rollout", "verifier"]
    # The head's own group comes first even when its name does not.
    last = RolesSection.model_validate({"head": {"on": "verifier"}, "verifier": {}, "learner": {}, "rollout": {}})
    assert last.groups()[0][0] == "verifier"


# ---- recipe and cluster


def cluster(**keys: object) -> ClusterFile:
    return ClusterFile.model_validate({"backend": "slurm", **keys})


def test_a_recipe_that_does_not_fit() -> None:
    recipe = load_recipe("quickstart", ["learner.ranks=9", "rollout.workers=3", "rollout.tensor_parallel=4"])
    one = cluster(roles={"head": {"on": "learner"}, "learner": {"gpus": 8}, "rollout": {"nodes": 3, "gpus": 2}})
    assert fit_problems(one, recipe) == [
        "roles.learner: 1 nodes x 8 GPUs, but the recipe wants 9 (learner 9)",
        "roles.rollout: 3 nodes x 2 GPUs, but the recipe wants 12 (rollout 12)",
        "roles.rollout.gpus: an engine (rollout.tensor_parallel = 4) must fit on a node of 2 GPUs",
    ]
    assert fit_problems(one, load_recipe("quickstart")) == []
    shared = cluster(roles={"head": {"gpus": 8}})
    recipe = load_recipe("quickstart", ["learner.ranks=4", "rollout.workers=5"])
    assert fit_problems(shared, recipe) == [
        "roles.head: 1 nodes x 8 GPUs, but the recipe wants 9 (learner 4, rollout 5)"
    ]


def test_missing_secrets_only_where_they_come_from_here() -> None:
    one = cluster(secrets=["A_KEY", "B_KEY"])
    assert missing_secrets(one, {"A_KEY": "x", "B_KEY": ""}) == ["B_KEY"]
    assert missing_secrets(ClusterFile.model_validate({"backend": "kubernetes", "secrets": ["A_KEY"]}), {}) == []


def test_a_submission_binds_roles_to_nodes_and_output_to_storage(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        SLURM + "  rollout: {gpus: 8}\n  verifier: {on: rollout}\nstorage: {runs: /shared/runs}\nsecrets: [A_KEY]\n"
    )
    with pytest.raises(RecipeError, match="secrets: A_KEY not set in this environment"):
        make_submission("quickstart", path, env={})
    one = make_submission("quickstart", path, ["run.name=My_Run.1"], env={"A_KEY": "x"})
    assert one.recipe.learner.placement.labels == {"grpo.dev/role": "learner"}
    assert one.recipe.verifiers.placement.labels == {"grpo.dev/role": "rollout"}
    assert str(one.run_dir) == "/shared/runs/My_Run.1"
    assert str(one.launch) == "/shared/runs/.launch/My_Run.1"
    assert one.id.startswith("my-run-1-")
    entry = one.entry("recipe.yaml")
    assert entry[entry.index("--secret") + 1] == "A_KEY"
    again = load_recipe(_written(tmp_path, one.recipe_text()))
    assert again == one.recipe


def _written(folder: Path, text: str) -> Path:
    path = folder / "resolved.yaml"
    path.write_text(text)
    return path


def test_one_kind_of_node_needs_no_binding(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("backend: slurm\nroles:\n  head: {gpus: 8}\n")
    one = make_submission("quickstart", path, ["run.out=relative/runs"])
    assert one.recipe.learner.placement.labels == {}
    assert one.recipe.run.out.is_absolute()


@pytest.mark.parametrize("name", ["A" * 90, "9lives", "a_b.c-", "x", "-".join("ab" * 30)])
def test_short_names_are_dns_labels(name: str) -> None:
    import re

    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,36}[a-z0-9])?", short_name(name))
