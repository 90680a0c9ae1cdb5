"""Two hosts on one machine: network namespaces joined by a cable (a veth pair) that can be pulled.

Each has a host name, a loopback address and an interface of its own, and shares files and process numbers with the
machine. Needs root and `ip` (iproute2).
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

_CABLE = "cable"
"""Name of the interface in both namespaces."""


class TwoHosts:
    """Two network namespaces and the cable between them. Close it: namespaces outlive the process."""

    addresses = ("10.29.0.1", "10.29.0.2")

    def __init__(self, folder: Path, name: str):
        """Makes them. folder: for their file of host names.  name: begins the names of both.

        Raises RuntimeError with the reason where this machine does not let us.
        """
        if os.geteuid() or shutil.which("ip") is None:
            raise RuntimeError("network namespaces need root and the program `ip` (iproute2)")
        self.names = [f"{name}-{i}" for i in range(2)]
        self._hosts = folder / "hosts"
        own = "".join(
            f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True)
        )
        self._hosts.write_text("127.0.0.1 localhost\n" + own)
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                _CABLE,
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                _CABLE,
                "netns",
                self.names[1],
            )
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "address", "add", f"{address}/24", "dev", _CABLE)
                _ip("-n", name, "link", "set", _CABLE, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise RuntimeError(f"network namespaces: {error.stderr.strip()}") from error

    def on(self, host: int, command: list[str]) -> list[str]:
        """Returns the command that runs `command` on a host, in the same process."""
        # `ip netns exec` gives it a mount namespace, in which the file of host names is its own.
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        inside = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            script,
            "sh",
            str(self._hosts),
            self.names[host],
            *command,
        ]
        return ["ip", "netns", "exec", self.names[host], *inside]

    def pull(self, host: int) -> None:
        """Pulls the cable out of a host: nothing passes any more, and no connection is told."""
        _ip("-n", self.names[host], "link", "set", _CABLE, "down")

    def plug(self, host: int) -> None:
        """Puts the cable back."""
        _ip("-n", self.names[host], "link", "set", _CABLE, "up")

    def close(self) -> None:
        """Deletes the namespaces, and with them the cable."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
