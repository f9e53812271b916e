"""Every rendered file against the rules of whoever reads it: KubeRay, Kubernetes, Ray, SkyPilot, bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist.submit.clouds import ray_up, skypilot
from grpo_dist.submit.kuberay import manifests, render
from grpo_dist.submit.plan import Submission, make_submission, ray_version
from grpo_dist.submit.verbs import backend_of
from tests.unit.kuberay_rules import CRDS, operator_problems, strict_schema

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
IDS = [str(path.relative_to(CONFIGS)) for path in FILES]


@cache
def submission(path: Path) -> Submission:
    return make_submission("quickstart", path, ["weights.backend=gloo"], dry_run=True)


def of_backend(*names: str) -> list[Any]:
    found = [path for path in FILES if yaml.safe_load(path.read_text())["backend"] in names]
    return [pytest.param(path, id=str(path.relative_to(CONFIGS))) for path in found]


def tool(name: str) -> str:
    """A linter from the environment's own bin folder."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip(f"{name} is not installed (pip install '.[dev]')")
    return found


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_shipped_cluster_file_renders_with_its_hash_and_without_secrets(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = submission(path)
    monkeypatch.setenv("WANDB_API_KEY", "planted-0123456789")
    text = backend_of(one.loaded.cluster.backend).render(one)
    assert f"sha256 {one.loaded.hash}" in text
    assert "planted-0123456789" not in text
    assert one.loaded.cluster.description
    assert "name: quickstart" in text or one.loaded.cluster.backend in ("slurm", "ray-up")


# ---- Kubernetes


@pytest.fixture(scope="module")
def rayjob_schema() -> dict[str, Any]:
    if not CRDS.is_dir():
        pytest.skip(f"KubeRay's definitions are not at {CRDS}")
    return strict_schema("rayjobs")


def schema_errors(schema: dict[str, Any], document: dict[str, Any]) -> list[str]:
    import jsonschema

    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("path", of_backend("kubernetes"))
def test_a_rayjob_is_valid_for_its_definition(path: Path, rayjob_schema: dict[str, Any]) -> None:
    assert schema_errors(rayjob_schema, manifests(submission(path))[1]) == []


def test_the_schema_check_catches_what_the_server_would(rayjob_schema: dict[str, Any]) -> None:
    job = manifests(submission(CONFIGS / "kubernetes" / "two-gpu-groups.yaml"))[1]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    job["spec"]["backoffLimit"] = "2"
    found = " ".join(schema_errors(rayjob_schema, job))
    assert "minReplica" in found
    assert "'2' is not of type 'integer'" in found


@pytest.mark.parametrize("path", of_backend("kubernetes"))
def test_the_operator_accepts_it(path: Path) -> None:
    assert list(operator_problems(manifests(submission(path))[1])) == []


@pytest.mark.parametrize("path", of_backend("kubernetes"))
def test_core_objects_and_pods_are_valid(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    config, job = manifests(submission(path))
    validate.validate(config, "1.33", strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {**pod["metadata"], "name": "x"}
        validate.validate(pod, "1.33", strict=True)


@pytest.mark.parametrize("path", of_backend("kubernetes"))
def test_what_people_forget_on_kubernetes(path: Path) -> None:
    """Shared memory in memory (k4), not root, a token, time to save, secrets by reference."""
    one = submission(path)
    cluster = one.loaded.cluster
    job = yaml.safe_load(render(one).split("---\n")[-1])
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == ray_version()
    head, *workers = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in (head, *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        (shm,) = [v for v in pod["volumes"] if v["name"] == "dshm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert int(shm["emptyDir"]["sizeLimit"]) < int(container["resources"]["limits"]["memory"])
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] > cluster.preemption.grace
        assert group["labels"]["grpo.dev/role"] in ("head", "learner", "rollout", "verifier")
        for name in cluster.secrets:
            (entry,) = [e for e in container["env"] if e["name"] == name]
            assert entry["valueFrom"]["secretKeyRef"] == {"name": cluster.kubernetes.secret, "key": name}
    assert (
        head["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
        == "grpo_dist.launch.driver"
    )
    nodes = 1 + sum(group["replicas"] for group in workers)
    assert nodes == sum(group.count for _, group in cluster.roles.groups())


def test_gang_queues_and_elastic_groups() -> None:
    """k6: only a group whose file says so is left to the autoscaler; the learner's never is."""
    volcano = manifests(submission(CONFIGS / "kubernetes" / "volcano.yaml"))[1]
    assert volcano["metadata"]["labels"]["volcano.sh/queue-name"] == "research"
    elastic = manifests(submission(CONFIGS / "kubernetes" / "two-gpu-groups.yaml"))[1]["spec"]["rayClusterSpec"]
    assert elastic["enableInTreeAutoscaling"] is True
    sizes = {g["groupName"]: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for g in elastic["workerGroupSpecs"]}
    assert sizes == {"learner": (1, 1, 1), "rollout": (1, 2, 3), "verifier": (1, 1, 1)}


def test_names_stay_within_the_operators_limits() -> None:
    for name in ("A" * 90, "9lives", "with_underscore.and.dots-", "x"):
        one = make_submission(
            "quickstart", CONFIGS / "kubernetes" / "cpu-quickstart.yaml", [f"run.name={name}"], dry_run=True
        )
        assert list(operator_problems(manifests(one)[1])) == []


# ---- ray up, SkyPilot


@pytest.mark.parametrize("path", of_backend("ray-up"))
def test_ray_accepts_its_cluster_configuration(path: Path) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load(ray_up(submission(path)))
    util.validate_config(util.prepare_config(dict(config)))
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    for command in commands:
        assert "RAY_AUTH_MODE=token" in command
        assert "ray stop" not in command
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert {kind["labels"]["grpo.dev/role"] for kind in config["available_node_types"].values()} == set(
        config["available_node_types"]
    )


def test_rays_validator_does_catch_a_typo() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load(ray_up(submission(CONFIGS / "cloud" / "ray-up-aws.yaml")))
    config["available_node_types"]["rollout"]["min_worker"] = 1
    with pytest.raises(Exception, match="min_worker"):
        util.validate_config(util.prepare_config(config))


SKY_KEYS = {"name", "resources", "num_nodes", "workdir", "file_mounts", "envs", "secrets", "setup", "run"}
SKY_RESOURCES = {
    "infra",
    "accelerators",
    "cpus",
    "memory",
    "disk_size",
    "image_id",
    "use_spot",
    "network_tier",
    "ports",
}


@pytest.mark.parametrize("path", of_backend("skypilot"))
def test_a_skypilot_task_has_known_keys_and_sound_scripts(path: Path, tmp_path: Path) -> None:
    task = yaml.safe_load(skypilot(submission(path)))
    assert set(task) <= SKY_KEYS
    assert set(task["resources"]) <= SKY_RESOURCES
    assert task["num_nodes"] == 2
    assert all(value is None for value in task["secrets"].values())
    script = tmp_path / "run.sh"
    script.write_text("#!/usr/bin/env bash\n" + task["run"])
    check_script(script)
    assert "12379" in task["run"]  # not SkyPilot's own Ray on 6380
    assert "ray stop" not in task["run"]


# ---- bash


def check_script(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    done = subprocess.run([tool("shellcheck"), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", of_backend("slurm"))
def test_a_batch_script_is_sound(path: Path, tmp_path: Path) -> None:
    one = submission(path)
    text = backend_of("slurm").render(one)
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    check_script(script)
    different = len({(g.gpus, g.cpus, g.memory, g.slurm) for _, g in one.loaded.cluster.roles.groups()}) > 1
    assert text.count("#SBATCH hetjob") == (len(one.loaded.cluster.roles.groups()) - 1 if different else 0)
    assert "#SBATCH --signal=B:USR1@" in text
    assert "ray stop" not in text
    assert "pkill" not in text
    for name in one.loaded.cluster.secrets:
        assert f"={name}=" not in text


@pytest.mark.parametrize("path", of_backend("ssh"))
def test_what_hosts_are_sent_is_sound(path: Path, tmp_path: Path) -> None:
    from grpo_dist.submit.ssh import node_script, placed

    one = submission(path)
    for host, role, group, is_head in placed(one.loaded.cluster):
        script = tmp_path / f"{host}.sh"
        address = None if is_head else "10.0.0.1:12000"
        text = node_script(one, host, role, group, head_address=address, env={}, token=None if is_head else "0" * 64)
        script.write_text("#!/usr/bin/env bash\n" + text.replace("<WANDB_API_KEY>", "x"))
        check_script(script)


def scripts() -> Iterator[Path]:
    for folder in ("launch", "docker"):
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".sh", ".sbatch") and p.is_file())


@pytest.mark.parametrize("path", list(scripts()), ids=lambda p: str(p.relative_to(ROOT)))
def test_shipped_scripts_are_sound(path: Path) -> None:
    check_script(path)
    text = path.read_text()
    assert "ray stop" not in text.replace("never `ray stop`", "")
    assert "pkill" not in text
    assert "killall" not in text
