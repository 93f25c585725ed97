"""Hosts of a network on one machine: network namespaces joined by a bridge, each with a name and a loopback of its own.

What runs in one of them reaches the others by TCP over a virtual Ethernet pair only. Needs root and iproute2.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lib.patience import until


class NoNamespaces(Exception):
    """This machine does not let us make namespaces; the text says why."""


class Host:
    """One of them.

    Attributes:
        name: of the namespace, and what ``hostname`` says inside.
        address: its IPv4 address on the network that they share.
        interface: the network interface that has it.
    """

    def __init__(self, name: str, address: str, interface: str) -> None:
        self.name = name
        self.address = address
        self.interface = interface
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], log: Path, *, cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Run a command there; what it and its children print goes to the end of ``log``."""
        shell = ["sh", "-ec", f'hostname {self.name}; exec "$@"', "sh", *command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", *shell],
                cwd=cwd,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def kill(self) -> None:
        """SIGKILL to every process on it, as when its power goes, except that the others' connections are closed."""
        until(self._is_dead, lambda: f"processes of {self.name} do not end: {_ip('netns', 'pids', self.name)}")

    def _is_dead(self) -> bool:
        """Return True if no process is left there; kill those that are."""
        pids = _ip("netns", "pids", self.name).split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.poll()
        return not pids

    def sent(self) -> int:
        """Return how many bytes have left it over the network that the hosts share."""
        command = ["ip", "netns", "exec", self.name, "cat", f"/sys/class/net/{self.interface}/statistics/tx_bytes"]
        return int(subprocess.run(command, check=True, text=True, capture_output=True).stdout)

    def unplug(self) -> None:
        """Cut it off the network; no other host is told."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """``count`` hosts; all that runs on them is killed at the end.

    Raises:
        NoNamespaces: see there.
    """
    mark = f"dq{os.getpid() % 100_000}"
    hosts = [Host(f"{mark}-{number}", f"10.213.0.{number + 1}", "eth0") for number in range(count)]
    switch = f"{mark}-s"
    try:
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number, host in enumerate(hosts):
                _ip("netns", "add", host.name)
                port = ["link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", f"port{number}"]
                _ip("-n", switch, *port)
                _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.name, "link", "set", "eth0", "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            raise NoNamespaces(f"no network namespaces here: {told.strip()}") from error
        yield hosts
    finally:
        made = {line.split()[0] for line in _ip("netns", "list", check=False).splitlines() if line}
        for host in hosts:
            if host.name in made:
                host.kill()
        for name in (*(host.name for host in hosts), switch):
            if name in made:
                _ip("netns", "del", name)


def _ip(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["ip", *arguments], check=check, text=True, capture_output=True).stdout
