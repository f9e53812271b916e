"""Port blocks: never two nodes on one port, never outside the range, the next block on a clash."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.errors import GrpoDistError
from grpo_dist.launch.ports import FIRST, LAST, PortPlan, block, key_of, pick, port_is_free, slots

keys = st.integers(0, 2**40)
worker_ports = st.sampled_from([0, 30, 36, 100, 500])


def all_ports(plan: PortPlan) -> set[int]:
    workers = range(plan.workers[0], plan.workers[1] + 1) if plan.workers else range(0)
    return set(plan.services) | set(workers)


@given(keys, keys, st.integers(0, 5), worker_ports)
def test_keys_in_different_slots_never_share_a_port(a: int, b: int, attempt: int, workers: int) -> None:
    one, two = block(a, attempt, workers), block(b, attempt, workers)
    if a % slots(workers) == b % slots(workers):
        assert one == two
    else:
        assert not all_ports(one) & all_ports(two)


@given(keys, st.integers(0, 2000), worker_ports)
def test_a_block_lies_in_the_range_and_has_no_port_twice(key: int, attempt: int, workers: int) -> None:
    plan = block(key, attempt, workers)
    assert len(set(plan.services)) == len(plan.services) == 11
    assert len(all_ports(plan)) == 11 + workers
    assert min(all_ports(plan)) >= FIRST
    assert max(all_ports(plan)) < LAST < 32_768


@given(keys, worker_ports)
def test_every_slot_is_tried(key: int, workers: int) -> None:
    tried = {block(key, attempt, workers).gcs for attempt in range(slots(workers))}
    assert len(tried) == slots(workers)


@given(keys, st.sets(st.integers(FIRST, LAST - 1), max_size=50))
def test_pick_avoids_every_busy_port(key: int, busy: set[int]) -> None:
    assert not set(pick(key, is_free=lambda port: port not in busy).services) & busy


def test_nothing_free_is_an_error_that_names_ports() -> None:
    with pytest.raises(GrpoDistError, match=r"no block of 16 free ports between 12000 and 28000.*\d{5}"):
        pick(7, is_free=lambda _: False)


def test_more_worker_ports_than_the_range_holds() -> None:
    with pytest.raises(ValueError, match="worker_ports"):
        block(1, worker_ports=20_000)


def test_a_listening_port_is_not_free() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert not port_is_free(sock.getsockname()[1])
    assert port_is_free(block(key_of("free", 1)).gcs) in (True, False)


def test_arguments_of_head_and_others() -> None:
    plan = block(3, worker_ports=30)
    head, other = plan.arguments(head=True), plan.arguments(head=False)
    assert set(head) - set(other) == {
        f"--port={plan.gcs}",
        f"--dashboard-port={plan.dashboard}",
        f"--ray-client-server-port={plan.client}",
    }
    assert f"--min-worker-port={plan.gcs + 16}" in other
    assert f"--max-worker-port={plan.gcs + 45}" in other
    assert block(3).arguments(head=False)[-2:] == ["--min-worker-port=0", "--max-worker-port=0"]
    assert plan.environment() == {
        "AUTOSCALER_METRIC_PORT": str(plan.gcs + 3),
        "DASHBOARD_METRIC_PORT": str(plan.gcs + 4),
    }


def test_keys_of_the_nodes_of_a_job_differ() -> None:
    found = {key_of(4711, node) % slots() for node in ("n1", "n2", "n3")}
    assert len(found) == 3
    assert key_of(4711, "n1") == key_of(4711, "n1")
