"""Counters that Linux keeps of a host: network, RDMA adapters, memory, open files, disk."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.monitoring.counters import Counter, NotThere

_INTERFACE = {
    "carrier_down_count": "carrier losses",
    "statistics/rx_errors": "receive errors",
    "statistics/tx_errors": "transmit errors",
    "statistics/rx_dropped": "dropped packets",
}
"""File of a network interface below /sys/class/net/NAME -> counter."""
_RDMA = {
    "counters/link_error_recovery": "link error recoveries",
    "counters/link_downed": "link downed",
    "counters/symbol_error": "symbol errors",
    "counters/port_rcv_errors": "RDMA receive errors",
    "hw_counters/out_of_sequence": "out of sequence packets",
    "hw_counters/local_ack_timeout_err": "RDMA timeouts",
}
"""File of an adapter's port below /sys/class/infiniband/NAME/ports/N -> counter."""


_CONTAINER = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the most bytes that the processes of a container may have,
of both versions of cgroups."""


def open_host(folder: Path | None) -> "HostCounters":
    """Opens the counters of this host. folder: on the disk to watch; None watches none.
    Raises NotThere."""
    if not Path("/proc/meminfo").exists():
        raise NotThere
    return HostCounters(folder)


class HostCounters:
    """A Linux host."""

    name = "host"

    def __init__(self, folder: Path | None, root: Path = Path("/")):
        """Watches the disk of `folder`. root: below which /proc and /sys lie."""
        self._folder = folder
        self._root = root

    def read(self) -> Iterator[Counter]:
        """Reads every counter. A file that is not there,
        or that this user may not read, is left out."""
        yield from self._read_interfaces()
        yield from self._read_adapters()
        yield from self._read_tcp()
        yield from self._read_memory()
        yield from self._read_open_files()
        if self._folder is not None:
            yield from _read_disk(self._folder)

    def _read_interfaces(self) -> Iterator[Counter]:
        """Reads the network interfaces that have a device: not the loopback, bridges
        and tunnels."""
        for interface in sorted(self._root.glob("sys/class/net/*")):
            if (interface / "device").exists():
                yield from _read_files(interface, f"interface {interface.name}", _INTERFACE)

    def _read_adapters(self) -> Iterator[Counter]:
        for port in sorted(self._root.glob("sys/class/infiniband/*/ports/*")):
            adapter = port.parent.parent.name
            yield from _read_files(port, f"RDMA adapter {adapter}, port {port.name}", _RDMA)

    def _read_tcp(self) -> Iterator[Counter]:
        """Reads /proc/net/snmp: a line of names and a line of values for each protocol."""
        lines = _lines(self._root / "proc/net/snmp")
        tcp = [line.split() for line in lines if line.startswith("Tcp:")]
        if len(tcp) == 2:
            values = dict(zip(*tcp, strict=False))
            yield Counter("TCP", "retransmitted segments", float(values["RetransSegs"]))

    def _read_memory(self) -> Iterator[Counter]:
        sizes = _table(self._root / "proc/meminfo")
        if sizes.get("MemTotal:") and "MemAvailable:" in sizes:
            available = 100 * sizes["MemAvailable:"] / sizes["MemTotal:"]
            yield Counter("memory", "available memory", available)
        pages = _table(self._root / "proc/vmstat")
        if "pswpin" in pages:
            yield Counter("memory", "pages swapped in", pages["pswpin"])

    def _read_open_files(self) -> Iterator[Counter]:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            opened = len(os.listdir(self._root / "proc/self/fd"))
        except OSError:
            return
        if limit != resource.RLIM_INFINITY:
            yield Counter("this process", "open files", 100 * opened / limit)


def process_memory(root: Path = Path("/")) -> tuple[float, float] | None:
    """Returns the most bytes that this process has had in memory, and those of its host;
    None where Linux does not say.

    The host is the container where that has a limit. root: below which /proc and /sys lie.
    """
    most = _table(root / "proc/self/status").get("VmHWM:")
    total = _table(root / "proc/meminfo").get("MemTotal:")
    if most is None or total is None:
        return None
    limits = [1024 * total]
    for file in _CONTAINER:
        words = "".join(_lines(root / file)).split()
        limits += [float(word) for word in words if word.isdigit()]
    return 1024 * most, min(limits)


def _read_disk(folder: Path) -> Iterator[Counter]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return
    yield Counter(f"disk of {folder}", "free disk", 100 * usage.free / usage.total)


def _read_files(folder: Path, part: str, names: dict[str, str]) -> Iterator[Counter]:
    """Reads files with one number each."""
    for file, name in names.items():
        words = " ".join(_lines(folder / file)).split()
        if len(words) == 1 and words[0].isdigit():
            yield Counter(part, name, float(words[0]))


def _table(file: Path) -> dict[str, float]:
    """Reads a file of lines such as `MemTotal: 24576 kB`."""
    rows = (line.split() for line in _lines(file))
    return {row[0]: float(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file of the kernel; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
