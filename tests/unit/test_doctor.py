"""The doctor's judgements, apart from what is asked; and the verb on this machine for real."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from grpo_dist import cli
from grpo_dist.doctor import machine, nodes, outside
from grpo_dist.doctor.machine import Look, Row
from grpo_dist.doctor.verb import lines
from grpo_dist.submit.cluster import ClusterFile


def levels(rows: Any) -> list[tuple[str, str]]:
    return [(row.level, row.subject) for row in rows]


def look(**facts: Any) -> Look:
    base = {"host": "n", "versions": {"torch": "2.13.0"}, "gpus": 8, "driver": "580.1", "environment": {}}
    return Look((), base | facts)


class TestThisMachine:
    def test_for_real(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        status = cli.run_command(["doctor", "--json"])
        found = json.loads(capfd.readouterr().out)
        subjects = {row["subject"]: row for row in found["rows"]}
        assert {"versions", "GPUs", "shared memory", "open files", "address", "ports", "sandbox", "W&B"} <= set(
            subjects
        )
        assert subjects["versions"]["level"] == "ok"
        assert status == (0 if found["ok"] else 1)
        assert cli.run_command(["doctor"]) == status
        text = capfd.readouterr().out
        assert "as pinned" in text
        assert text.splitlines()[-1].endswith("warnings")

    def test_an_interface_that_is_not_there_fails(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "c.yaml").write_text("backend: slurm\ninterface: ib7\n")
        assert cli.run_command(["doctor", "--cluster", str(tmp_path / "c.yaml")]) == 1
        out = capfd.readouterr().out
        assert "network interface 'ib7' is not on this machine" in out

    def test_wrong_input_is_exit_2(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert cli.run_command(["doctor", "--cluster", "/nowhere.yaml"]) == 2
        root = Path(__file__).parents[2]
        assert cli.run_command(["doctor", "--cluster", str(root / "cluster_configs/cloud/skypilot.yaml")]) == 2
        assert "its machines are made by another tool" in capfd.readouterr().err

    def test_versions_against_the_pins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = ["torch==1.0", "no-such-package>=2", "numpy>=1.26", "pytest>99; extra == 'dev'"]
        monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: wanted)
        (row,) = machine.version_rows()
        assert row.level == "fail"
        assert "wanted ==1.0; no-such-package is missing: install into a fresh environment" in row.text
        assert "numpy" not in row.text

    def test_what_breaks_by_environment(self) -> None:
        bad = {
            "VLLM_PORT": "tcp://10.0.0.1:80", "NCCL_CUMEM_ENABLE": "0", "RAY_process_group_cleanup_enabled": "0",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "https_proxy": "http://p:3128",
        }  # fmt: skip
        assert [row.subject for row in machine.environment_rows(bad)] == [
            "VLLM_PORT", "NCCL_CUMEM_ENABLE", "Ray", "Ray", "proxy",
        ]  # fmt: skip
        assert list(machine.environment_rows({"https_proxy": "http://p", "no_proxy": "10.0.0.0/8"})) == []

    def test_gpus_as_nvidia_smi_lists_them(self) -> None:
        def gpu(index: int, **changes: str) -> dict[str, str]:
            base = {"index": str(index), "name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06",
                    "memory.total": "81559", "memory.used": "4", "compute_mode": "Default",
                    "mig.mode.current": "Disabled"}  # fmt: skip
            return base | changes

        assert levels(machine.graphics_rows([gpu(0), gpu(1)], [])) == [("ok", "GPUs")]
        assert levels(machine.graphics_rows([], [])) == [("fail", "GPUs")]
        sick = [
            gpu(0, **{"memory.used": "60000"}), gpu(1, **{"mig.mode.current": "Enabled"}),
            gpu(2, compute_mode="Exclusive_Process"), gpu(3, name="NVIDIA A100"),
        ]  # fmt: skip
        rows = list(machine.graphics_rows(sick, ["4711, 59000, python"]))
        assert levels(rows)[1:] == [("warn", "GPUs"), ("warn", "GPU 0"), ("warn", "GPU 1"), ("warn", "GPU 2")]
        assert "4711, 59000, python" in rows[2].text


class TestCluster:
    def test_what_differs_between_nodes(self) -> None:
        assert levels(nodes.difference_rows({"a": look(), "b": look()})) == [("ok", "nodes")]
        assert list(nodes.difference_rows({"a": look()})) == []
        other = look(versions={"torch": "2.12.0"}, environment={"NCCL_SOCKET_IFNAME": "=eth1"})
        rows = list(nodes.difference_rows({"a": look(), "b": other}))
        assert [(row.level, row.subject, row.node) for row in rows] == [
            ("fail", "versions", "b"), ("warn", "environment", "b"),
        ]  # fmt: skip
        assert rows[0].text == "differs from a: torch 2.12.0, not 2.13.0"
        assert rows[1].text == "differs from a: NCCL_SOCKET_IFNAME =eth1, not not set"

    def test_roles_against_the_cluster_file(self) -> None:
        body = {"backend": "slurm", "roles": {"head": {"on": "learner"}, "learner": {}, "rollout": {"nodes": 2}}}
        loaded = ClusterFile.model_validate(body)
        there = [{"Labels": {"grpo.dev/role": role}} for role in ("learner", "rollout")]
        rows = list(nodes.role_rows(loaded, there))
        assert levels(rows) == [("ok", "role learner"), ("fail", "role rollout")]
        assert rows[1].text.startswith("1 of 2 nodes live")
        alike = ClusterFile.model_validate({"backend": "slurm", "roles": {"head": {}}})
        assert list(nodes.role_rows(alike, there)) == []
        assert levels(nodes.role_rows(alike, [])) == [("fail", "nodes")]

    def test_dead_nodes_and_gpus_that_ray_made_up(self) -> None:
        dead = {"NodeManagerAddress": "10.0.0.2", "Alive": False, "DeathReasonMessage": "health check failed"}
        assert nodes.node_row(dead) == Row("warn", "node", "is dead: health check failed", "10.0.0.2")
        alive = {"NodeManagerAddress": "a", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 8.0}, "Labels": {"x": "y"}}
        assert nodes.node_row(alive).text == "CPU 4, GPU 8; x=y"
        assert levels(nodes.gpu_count_rows([alive], {"a": look(gpus=4)})) == [("fail", "GPUs")]
        assert levels(nodes.gpu_count_rows([alive], {"a": look(gpus=9)})) == [("warn", "GPUs")]
        assert list(nodes.gpu_count_rows([alive], {"a": look()})) == []

    def test_measured_gpus(self) -> None:
        def gpu(name: str, **changes: Any) -> dict[str, Any]:
            return {"visible": 1, "uuid": name, "free": 0.99, "finite": True, "teraflops": 700.0} | changes

        rows = list(nodes.gpu_rows([("n", gpu("a")), ("n", gpu("b", teraflops=710.0))]))
        assert [row.text for row in rows] == ["2 measured: 700 to 710 TFLOP/s in bf16"]
        sick = [
            gpu("a"), gpu("b"), gpu("c", teraflops=300.0), gpu("d", finite=False), gpu("e", free=0.5),
            {"visible": 8}, {"error": "CUDA error"},
        ]  # fmt: skip
        rows = list(nodes.gpu_rows([("n", said) for said in sick]))
        assert [row.level for row in rows] == ["warn", "fail", "warn", "fail", "fail", "ok"]
        twice = nodes.gpu_rows([("n", gpu("a")), ("m", gpu("a"))])
        assert any("was given to two workers" in row.text for row in twice)


class TestOutside:
    def test_wandb(self) -> None:
        assert outside.wandb_row({"WANDB_MODE": "offline"}).level == "ok"
        assert "kept offline" in outside.wandb_row({"NETRC": "/nowhere"}).text
        with socket.create_server(("127.0.0.1", 0)) as server:
            base = f"http://127.0.0.1:{server.getsockname()[1]}"
            there = outside.wandb_row({"WANDB_API_KEY": "x", "WANDB_BASE_URL": base})
        gone = outside.wandb_row({"WANDB_API_KEY": "x", "WANDB_BASE_URL": base})
        assert there.text == "127.0.0.1 answers, a key is set"
        assert gone.level == "warn"

    def test_tools_and_secrets_that_are_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("A_KEY", raising=False)
        slurm = ClusterFile.model_validate({"backend": "slurm", "secrets": ["A_KEY"]})
        assert levels(outside.outside_rows(slurm)) == [("fail", "secrets"), ("fail", "Slurm")]
        pods = ClusterFile.model_validate({"backend": "kubernetes"})
        assert levels(outside.outside_rows(pods)) == [("fail", "kubectl")]
        hosts = ClusterFile.model_validate({"backend": "ssh", "roles": {"head": {"hosts": ["h1"]}}})
        assert [(row.level, row.node) for row in outside.outside_rows(hosts)] == [("fail", "h1")]

    def test_a_dashboard_that_does_not_answer(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("t" * 32)
        (tmp_path / "token").chmod(0o600)
        body = {"backend": "ray", "ray": {"address": "http://127.0.0.1:1", "token": str(tmp_path / "token")}}
        (row,) = outside.outside_rows(ClusterFile.model_validate(body))
        assert row.level == "fail"
        assert "127.0.0.1:1" in row.text


def test_lines_are_by_node() -> None:
    rows = [Row("ok", "a", "one"), Row("warn", "long", "two", "n1"), Row("fail", "b", "three")]
    assert list(lines(rows)) == [
        "ok    a     one",
        "fail  b     three",
        "\nn1",
        "warn  long  two",
        "\n1 failed, 1 warnings",
    ]
