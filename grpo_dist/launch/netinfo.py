"""Which address of this machine the other nodes reach it at.

    interfaces of the kernel ─► by name, address or network if one is wanted ─► else the one that routes to the peer
                                                 └─► exactly one address, never loopback, link-local or a guess

Host names are not asked: on many machines the own name means 127.0.1.1, or the slow management network.
`python -m grpo_dist.launch.netinfo [--interface ib0] [--peer head-node]` prints the address.
Left out: IPv6.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of one interface that is up."""

    name: str
    ip: str

    @property
    def why_not(self) -> str | None:
        """Why another node cannot use this address, or None."""
        address = ipaddress.ip_address(self.ip)
        if address.is_loopback:
            return "loopback"
        if address.is_link_local:
            return "link-local"
        if address.is_unspecified:
            return "empty"
        return None


def interfaces() -> list[Interface]:
    """Every IPv4 address of every interface that is up, as the kernel lists them (SIOCGIFCONF)."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        size, record = 64 * 1024, 40  # struct ifreq has 40 bytes on 64-bit Linux
        buffer = array.array("B", bytes(size))
        filled = struct.unpack("iL", fcntl.ioctl(sock, 0x8912, struct.pack("iL", size, buffer.buffer_info()[0])))[0]
        data = buffer.tobytes()[:filled]
        found = []
        for start in range(0, filled, record):
            raw = data[start : start + 16]
            name = raw.split(b"\0", 1)[0].decode()
            flags = struct.unpack("H", fcntl.ioctl(sock, 0x8913, raw + bytes(24))[16:18])[0]  # SIOCGIFFLAGS
            if flags & 0x1:
                found.append(Interface(name.split(":", 1)[0], socket.inet_ntoa(data[start + 20 : start + 24])))
    return found


def routed_address(peer: str = "192.0.2.1") -> str | None:
    """The own address on the way to ``peer``; nothing is sent. The default peer stands for the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((peer, 9))
            return str(sock.getsockname()[0])
        except OSError:
            return None


def choose_address(present: Sequence[Interface], wanted: str | None = None, routed: str | None = None) -> Interface:
    """The one address to announce.

    Args:
        present: what `interfaces` found.
        wanted: an interface name, an address, or a network such as 10.0.0.0/8.
        routed: the address the kernel would use towards the peer.

    Raises:
        UserError: nothing or more than one thing fits; lists what is there.
    """
    usable = [one for one in present if one.why_not is None]
    if wanted:
        fitting = [one for one in present if _fits(one, wanted)]
        if not fitting:
            raise UserError(f"network interface {wanted!r} is not on this machine; {_listed(present)}")
        good = [one for one in fitting if one.why_not is None]
        if not good:
            raise UserError(f"network interface {wanted!r} has only {_listed(fitting)}; {_listed(present)}")
        if len(good) > 1:
            raise UserError(
                f"network interface {wanted!r} means more than one address; name one of them: {_listed(good)}"
            )
        return good[0]
    for one in usable:
        if one.ip == routed:
            return one
    if len(usable) == 1:
        return usable[0]
    what = "no address that another node could reach" if not usable else "no route decides between several addresses"
    raise UserError(f"{what}: set `interface` in the cluster file (or --interface); {_listed(present)}")


def _fits(one: Interface, wanted: str) -> bool:
    if one.name == wanted:
        return True
    try:
        return ipaddress.ip_address(one.ip) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _listed(present: Sequence[Interface]) -> str:
    shown = [f"{one.name} {one.ip}" + (f" ({why})" if (why := one.why_not) else "") for one in present]
    return "present: " + (", ".join(shown) or "none")


def own_address(wanted: str | None = None, peer: str | None = None) -> Interface:
    """`choose_address` for this machine; ``peer`` is a host name or address on the other side."""
    target = socket.gethostbyname(peer) if peer else None
    return choose_address(interfaces(), wanted, routed_address(target) if target else routed_address())


def network_env(name: str) -> dict[str, str]:
    """Gloo wants one exact name; NCCL takes prefixes unless told otherwise by '='."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def interface_variable_problems(env: Mapping[str, str], present: Sequence[Interface]) -> list[str]:
    """What is wrong with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on a machine with these interfaces."""
    names = sorted({one.name for one in present})
    there = f"present: {', '.join(names)}"
    problems = []
    gloo = env.get("GLOO_SOCKET_IFNAME", "")
    for one in filter(None, gloo.split(",")):
        if one not in names:
            problems.append(f"GLOO_SOCKET_IFNAME={gloo}: no interface is called {one!r} (exact names only); {there}")
    nccl = env.get("NCCL_SOCKET_IFNAME", "")
    if nccl:
        exclude, exact = nccl.startswith("^"), nccl.lstrip("^").startswith("=")
        parts = nccl.lstrip("^=").split(",")

        def named(name: str) -> bool:
            return name in parts if exact else any(name.startswith(part) for part in parts)

        if not any(named(name) != exclude for name in names if name != "lo"):
            problems.append(f"NCCL_SOCKET_IFNAME={nccl}: leaves no interface to use; {there}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.launch.netinfo", description="Print the address of this node.")
    parser.add_argument("--interface", default=os.environ.get("GRPO_INTERFACE"))
    parser.add_argument("--peer", help="host on the other side; its route decides")
    options = parser.parse_args(arguments)
    try:
        print(own_address(options.interface, options.peer).ip)
    except (UserError, OSError) as error:
        print(f"netinfo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
