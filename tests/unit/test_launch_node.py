"""What a node decides before Ray starts: its address, its token, whether the machine is fit, who is missing."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.launch import checks, entry
from grpo_dist.launch.folder import AttemptFolder, attempts, keep_logs
from grpo_dist.launch.membership import wait_for_nodes
from grpo_dist.launch.netinfo import (
    Interface,
    choose_address,
    interface_variable_problems,
    interfaces,
    main,
    network_env,
)
from grpo_dist.launch.node_options import parse, role_at
from grpo_dist.launch.processes import descendants, end_descendants, is_running, started_at
from grpo_dist.launch.tokens import check_token, clean_env, token_env, write_token

LO, ETH, IB = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.5"), Interface("ib0", "192.168.7.5")
LINK_LOCAL, DEBIAN = Interface("eth1", "169.254.3.4"), Interface("lo", "127.0.1.1")


# ---- address


def test_the_route_decides_between_several() -> None:
    assert choose_address([LO, ETH, IB], routed="192.168.7.5") == IB


def test_the_only_usable_address_needs_no_route() -> None:
    assert choose_address([LO, DEBIAN, LINK_LOCAL, ETH]) == ETH


@pytest.mark.parametrize("wanted", ["ib0", "192.168.7.5", "192.168.0.0/16"])
def test_wanted_by_name_address_or_network(wanted: str) -> None:
    assert choose_address([LO, ETH, IB], wanted, routed="10.0.0.5") == IB


def test_an_absent_interface_lists_the_present_ones() -> None:
    with pytest.raises(
        UserError, match=r"'ib7' is not on this machine; present: lo 127.0.0.1 \(loopback\), eth0 10.0.0.5"
    ):
        choose_address([LO, ETH], "ib7")


@pytest.mark.parametrize(("wanted", "why"), [("lo", "loopback"), ("eth1", "link-local")])
def test_an_address_that_nobody_reaches_is_refused(wanted: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        choose_address([LO, LINK_LOCAL, ETH], wanted)


@pytest.mark.parametrize("routed", [None, "127.0.0.1", "169.254.3.4", "0.0.0.0"])
def test_no_guess_between_several(routed: str | None) -> None:
    with pytest.raises(UserError, match="set `interface` in the cluster file"):
        choose_address([LO, LINK_LOCAL, ETH, IB], routed=routed)


def test_nothing_usable() -> None:
    with pytest.raises(UserError, match="no address that another node could reach"):
        choose_address([LO, DEBIAN])
    with pytest.raises(UserError, match="present: none"):
        choose_address([])


def test_two_values_on_one_interface_must_be_told_apart() -> None:
    second = Interface("eth0", "10.9.0.5")
    with pytest.raises(UserError, match="more than one address"):
        choose_address([ETH, second], "eth0")
    assert choose_address([ETH, second], "10.9.0.0/16") == second


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert Interface("lo", "127.0.0.1") in interfaces()
    assert main(["--interface", "nope0"]) == 2
    assert "'nope0' is not on this machine; present:" in capsys.readouterr().err


def test_interface_variables() -> None:
    present = [LO, ETH, IB]
    assert network_env("ib0") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    good: list[dict[str, str]] = [
        {},
        network_env("ib0"),
        {"NCCL_SOCKET_IFNAME": "ib,eth"},
        {"NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"GLOO_SOCKET_IFNAME": "eth0,ib0"},
    ]
    for env in good:
        assert interface_variable_problems(env, present) == []
    for key, value in [
        ("GLOO_SOCKET_IFNAME", "ib"),  # a prefix is fine for NCCL, not for Gloo
        ("GLOO_SOCKET_IFNAME", "bond0"),
        ("NCCL_SOCKET_IFNAME", "bond"),
        ("NCCL_SOCKET_IFNAME", "=ib"),
        ("NCCL_SOCKET_IFNAME", "^eth,ib"),
    ]:
        (problem,) = interface_variable_problems({key: value}, present)
        assert problem.startswith(f"{key}={value}")
        assert "present: eth0, ib0, lo" in problem


# ---- token


def test_a_token_is_for_its_owner_only_and_kept(tmp_path: Path) -> None:
    os.umask(old := os.umask(0))  # whatever the umask
    path = write_token(tmp_path / "sub" / "ray_token")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(value := path.read_text()) == 64
    assert write_token(path).read_text() == value
    assert old == os.umask(old)


def test_token_problems_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        check_token(tmp_path / "none")
    path = write_token(tmp_path / "t")
    path.chmod(0o644)
    with pytest.raises(UserError, match=f"others can read it: chmod 600 {path}"):
        check_token(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        check_token(path)


def test_the_environment_carries_a_path_not_a_value(tmp_path: Path) -> None:
    path = write_token(tmp_path / "t")
    assert token_env(path) == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert clean_env({"RAY_ADDRESS": "x", "RAY_AUTH_TOKEN": "y", "PATH": "z"}) == {"PATH": "z"}


# ---- fitness


def test_little_shared_memory_is_a_warning_with_the_flag_to_set(tmp_path: Path) -> None:
    """k4"""
    assert checks.check_shared_memory(tmp_path, want=0).level == "ok"
    finding = checks.check_shared_memory(tmp_path, want=1 << 60)
    assert finding.level == "warning"
    assert "--shm-size" in finding.text


def test_a_full_temporary_folder_is_refused(tmp_path: Path) -> None:
    assert checks.check_temporary_space(tmp_path, refuse=0, warn=0).level == "ok"
    assert checks.check_temporary_space(tmp_path, refuse=0, warn=1 << 60).level == "warning"
    finding = checks.check_temporary_space(tmp_path, refuse=1 << 60)
    assert finding.level == "fatal"
    assert "TMPDIR" in finding.text


def test_a_long_temporary_path_is_refused() -> None:
    assert checks.check_temporary_length(Path("/tmp/gdabcdefgh")).level == "ok"
    assert checks.check_temporary_length(Path("/tmp/" + "x" * 60)).level == "fatal"


def test_a_wrong_interface_variable_is_fatal() -> None:
    (finding,) = checks.check_interface_variables({"GLOO_SOCKET_IFNAME": "nope0"})
    assert finding.level == "fatal"


# ---- folder and membership


def test_attempt_folder(tmp_path: Path) -> None:
    for number in (0, 10, 2):
        (tmp_path / f"attempt-{number}").mkdir()
    (tmp_path / "attempt-x").mkdir()
    assert [one.path.name for one in attempts(tmp_path)] == ["attempt-0", "attempt-2", "attempt-10"]
    folder = attempts(tmp_path)[0]
    assert folder.cluster() is None
    assert folder.exit_code() is None
    assert folder.take_control() == ""
    folder.write_cluster(address="10.0.0.1:12000")
    folder.write_exit(85, "saved")
    folder.ask("requeue")
    assert (folder.head_address(), folder.exit_code(), folder.take_control(), folder.take_control()) == (
        "10.0.0.1:12000", 85, "requeue", "",
    )  # fmt: skip


def test_a_new_head_forgets_an_earlier_one_but_not_its_own_nodes(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path)
    folder.set_state("n2", "failed", "quicker than the head")
    folder.clear()
    assert folder.states()["n2"]["state"] == "failed"
    folder.write_cluster(address="10.0.0.1:1")
    folder.write_exit(0, "done")
    folder.ask("stop")
    folder.clear()
    assert (folder.states(), folder.cluster(), folder.exit_code(), folder.take_control()) == ({}, None, None, "")


def test_logs_are_kept_and_cut_from_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.launch.folder.MOST_LOG_BYTES", 4)
    logs = tmp_path / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.out").write_text("0123456789")
    keep_logs(tmp_path, tmp_path / "kept")
    assert (tmp_path / "kept" / "worker-1.out").read_text() == "6789"


def wait(folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch, present: set[str], seconds: float = 0) -> None:
    monkeypatch.setattr("grpo_dist.launch.membership.living_names", lambda _: present)
    wait_for_nodes("h:1", ["a", "b", "c"], seconds, folder.states, lambda: None, lambda _: None)


def test_the_missing_are_named_with_what_they_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptFolder(tmp_path)
    wait(folder, monkeypatch, {"a", "b", "c", "extra"})
    folder.set_state("b", "starting", "")
    with pytest.raises(GrpoDistError) as caught:
        wait(folder, monkeypatch, {"a"})
    assert str(caught.value).splitlines() == [
        "1 of 3 nodes joined within 0 s; missing:",
        "  b: starting",
        "  c: never reported: not started, or no shared storage",
    ]


def test_a_failed_node_ends_the_wait_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptFolder(tmp_path)
    folder.set_state("c", "failed", "no token")
    with pytest.raises(GrpoDistError, match="c: failed no token"):
        wait(folder, monkeypatch, {"a", "b"}, seconds=1000)


# ---- entry


def test_entry_refuses_a_missing_secret_and_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["recipe.yaml", "--submission", "s1", "--marks", str(tmp_path)]
    assert entry.main([*common, "--secret", "GRPO_TEST_NOT_SET"]) == 2
    assert "secret GRPO_TEST_NOT_SET is not in the environment" in capsys.readouterr().err
    assert entry.main([*common, "--version", "pydantic==0.0.1", "--version", "nopackage==1"]) == 2
    assert "pydantic: 0.0.1 where the run was submitted" in capsys.readouterr().err


def test_entry_resumes_the_second_time(tmp_path: Path) -> None:
    assert not entry.started_before(tmp_path / "marks", "s1")
    assert entry.started_before(tmp_path / "marks", "s1")
    assert not entry.started_before(tmp_path / "marks", "s2")


def test_node_options() -> None:
    options = parse(
        [
            "--folder",
            "f",
            "--name",
            "n1",
            "--role",
            "learner",
            "--head",
            "--expect",
            "n1,n2",
            "--label",
            "a=b",
            "--",
            "run",
            "me",
            "--now",
        ]
    )
    assert options.expect == ("n1", "n2")
    assert options.command == ("run", "me", "--now")
    assert options.labels == {"a": "b"}
    with pytest.raises(SystemExit):
        parse(["--folder", "f", "--name", "n1", "--role", "learner", "--head"])


# ---- processes


def test_only_own_descendants_end_orphans_included() -> None:
    # The runner starts a child that leaves a grandchild behind in a session of its own, and dies.
    runner = subprocess.Popen(
        [sys.executable, "-c", _RUNNER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        out, _ = runner.communicate(timeout=60)
        orphan = int(out.split()[0])
        assert out.split()[1:] == ["left", "[]"]
        assert not is_running(orphan, None)
        assert is_running(bystander.pid, started_at(bystander.pid))
        assert bystander.pid in descendants(os.getpid())
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()
    assert not is_running(bystander.pid, None)


_RUNNER = """
import os, subprocess, time
from grpo_dist.launch.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
child = subprocess.Popen(["sh", "-c", "setsid sleep 60 & echo $!"], stdout=subprocess.PIPE, text=True)
pid = int(child.stdout.readline())
child.wait()
assert pid in descendants(os.getpid()), descendants(os.getpid())
print(pid, "left", end_descendants(os.getpid(), 10))
"""


def test_a_process_that_reuses_a_pid_is_another_one() -> None:
    assert is_running(os.getpid(), started_at(os.getpid()))
    assert not is_running(os.getpid(), "1")
    assert end_descendants(10**9, 0) == []


def test_roles_by_index_the_first_is_the_head() -> None:
    assert [role_at("learner:2,rollout:1,verifier", i) for i in range(4)] == [
        "learner",
        "learner",
        "rollout",
        "verifier",
    ]
    with pytest.raises(UserError, match="node 3 is one more"):
        role_at("learner:2,rollout:1", 3)
    options = parse(["--folder", "f", "--name", "a", "--roles", "learner:1,rollout:2", "--index", "0", "--", "run"])
    assert (options.role, options.head) == ("learner", True)
    options = parse(["--folder", "f", "--name", "b", "--roles", "learner:1,rollout:2", "--index", "2", "--", "run"])
    assert (options.role, options.head) == ("rollout", False)


def test_the_scheduler_tells_name_place_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLURMD_NODENAME", "n7"), ("SLURM_PROCID", "1"), ("SLURM_CPUS_ON_NODE", "12")):
        monkeypatch.setenv(name, value)
    options = parse(["--folder", "f", "--roles", "learner:1,rollout:1", "--", "run"])
    assert (options.name, options.role, options.cpus) == ("n7", "rollout", 12)
