"""A real Slurm on this machine, alone for a test: own munged, slurmctld and three slurmd, own ports and folders.

    with slurm_host(folder) as slurm:
        slurm.run(["sbatch", "job.sbatch"])

The three nodes n1, n2, n3 are this host three times, so they share its address: what runs on them has to choose ports
that do not clash. Started without systemd, ended by pid. Needs root and Debian's slurm-wlm and munge (`unavailable`
says what is missing).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_dist.launch.ports import port_is_free

NODES = ("n1", "n2", "n3")
CPUS = 4  # of a node, whatever the machine has

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
InactiveLimit=0
MinJobAge=900
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=debug Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def unavailable() -> str | None:
    """Why Slurm cannot be started here, or None."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    return "Slurm's daemons need root" if os.geteuid() else None


class SlurmHost:
    """The running daemons. ``env`` is what Slurm's commands need to find them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, command: Sequence[str], *, check: bool = True, **extra: str) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.env, **extra}, capture_output=True, text=True, timeout=60
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env={**os.environ, **self.env}, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, name: str) -> None:
        self.start(name, ["slurmd", "-D", "-N", name])

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        process = self.daemons.pop(name)
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)

    def job(self, job: str) -> dict[str, str]:
        """`scontrol show job` as a mapping."""
        words = self.run(["scontrol", "show", "job", "-o", job]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, states: Sequence[str], seconds: float = 120) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while (facts := self.job(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"job {job} is {facts['JobState']} ({facts.get('Reason')}), not {states}\n{self.tail()}"
                )
            time.sleep(0.3)
        return facts

    def tail(self, lines: int = 15) -> str:
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def slurm_host(folder: Path) -> Iterator[SlurmHost]:
    """Daemons up and all nodes idle; jobs cancelled and daemons ended at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname()
    ports = [port for port in range(28_100, 28_400) if port_is_free(port)][: len(NODES) + 1]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=4000 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, port=ports[0], nodes=nodes))
    slurm = SlurmHost(folder)
    try:
        slurm.start("munged", _munged(folder))
        until(lambda: (folder / "munge.socket").exists(), "munged did not start")
        slurm.start("slurmctld", ["slurmctld", "-D"])
        for name in NODES:
            slurm.start_node(name)
        until(
            lambda: slurm.run(["sinfo", "-h", "-o", "%t %D"], check=False).split() == ["idle", "3"],
            "nodes are not idle",
            slurm,
        )
        yield slurm
    finally:
        if "slurmctld" in slurm.daemons:
            slurm.run(["scancel", "--full", "--user=root"], check=False)
            until(lambda: not slurm.run(["squeue", "-h"], check=False).split(), "jobs did not end", slurm, raises=False)
        for name in (*NODES, "slurmctld", "munged"):
            if name in slurm.daemons:
                slurm.stop(name)


def _munged(folder: Path) -> list[str]:
    return [
        "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip


def until(done: object, what: str, slurm: SlurmHost | None = None, seconds: float = 40, *, raises: bool = True) -> None:
    assert callable(done)
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            if raises:
                raise AssertionError(f"{what}\n{slurm.tail() if slurm else ''}")
            return
        time.sleep(0.3)
