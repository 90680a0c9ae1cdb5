"""Counters of a machine: what one is, which there are, from which value each is a warning,
and what to do then.

A *count* only grows (errors of a link): its increase within an hour is judged. A *level* goes up
and down (a temperature margin): its value is judged, in several readings where one may be chance. A
*rate* is a count that is never quite 0 on a healthy machine (retransmitted segments): it is judged
against its own earlier rate.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol


class Counter(NamedTuple):
    """One number that a machine keeps of one of its parts."""

    part: str
    """Full name of the part: `GPU 3 (NVIDIA H100, serial 1650524, 00000000:5D:00.0), NVLink 14`."""
    name: str
    """Key of `RULES`."""
    value: float


class Source(Protocol):
    """Interface of a machine that has counters. Anything with a name and a `read` is one."""

    name: str

    def read(self) -> Iterable[Counter]:
        """Reads every counter now. What a device does not support is left out."""
        ...


class NotThere(Exception):
    """A machine has no such interface;
    its text names the package or permission that is missing, if one is.

    It is empty on a machine without such hardware.
    """


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a counter is a warning, and what to do then."""

    kind: Literal["count", "level", "low level", "below others", "rate", "shown"]
    """`low level`: a warning at or below the limit. `below others`: the limit is a share of the
    median of the same counter of all parts. `shown`: never a warning."""
    limit: float = 0.0
    """Increase in an hour (count, rate) or value (level) from which it is one."""
    advice: str = ""
    readings: int = 1
    """Consecutive readings in which a level has to be beyond its limit."""
    unit: str = ""


_CORDON_LINK = (
    "cordon the host and have the link looked at: errors on a link come before its failure"
)
_CORDON_GPU = "cordon the host, reset the GPU (nvidia-smi -r) and have it tested"
_COOLING = "have the cooling and the power of the host looked at: this GPU sets the pace of all"

RULES: dict[str, Rule] = {
    # NVIDIA GPUs (NVML). Limits of counts that a healthy device keeps at 0 are 1.
    "lost": Rule("level", 1, "cordon the host: the GPU has fallen off the bus, and needs a reboot"),
    "Xid errors": Rule(
        "level", 1, "look the number up in NVIDIA's Xid catalog", unit="since the last reading"
    ),
    "uncorrected ECC errors": Rule("count", 1, _CORDON_GPU),
    "corrected ECC errors": Rule(
        "count", 100, "watch it; a GPU whose rate grows is to be replaced"
    ),
    "row remappings pending": Rule("level", 1, "reset the GPU when the run has ended"),
    "failed row remappings": Rule("level", 1, "replace the GPU: it has no spare rows left"),
    "NVLink recoveries": Rule("count", 5, _CORDON_LINK),
    "NVLink replays": Rule("count", 100, _CORDON_LINK),
    "NVLink CRC errors": Rule("count", 100, _CORDON_LINK),
    "NVLinks down": Rule("level", 1, "cordon the host: collectives go around the link, or hang"),
    "PCIe replays": Rule("count", 100, "reseat the GPU, or cordon the host"),
    "slowed by heat": Rule("level", 1, _COOLING, readings=3),
    "slowed by power": Rule("level", 1, _COOLING, readings=3),
    "degrees below slowdown": Rule("low level", 2, _COOLING, readings=3, unit="°C"),
    "SM clock": Rule("below others", 0.9, _COOLING, 3, "MHz"),
    "temperature": Rule("shown", unit="°C"),
    # TPUs (libtpu). Link health: 1 to 5 transient, 6 to 9 lasting, 10 unusable.
    "ICI link health": Rule("level", 1, _CORDON_LINK, readings=3),
    "throttle score": Rule("level", 1, "have the host looked at: this TPU sets the pace of all", 3),
    # The host's network and its RDMA adapters.
    "carrier losses": Rule("count", 1, "have the cable, the optics and the port looked at"),
    "receive errors": Rule("rate", 100, "have the cable, the optics and the port looked at"),
    "transmit errors": Rule("rate", 100, "have the cable, the optics and the port looked at"),
    "dropped packets": Rule("rate", 1000, "larger receive buffers (ethtool -G), or less traffic"),
    "retransmitted segments": Rule("rate", 1000, "look for a full or a failing link on the way"),
    "link error recoveries": Rule("count", 1, _CORDON_LINK),
    "link downed": Rule("count", 1, _CORDON_LINK),
    "symbol errors": Rule("count", 100, _CORDON_LINK),
    "RDMA receive errors": Rule("count", 100, _CORDON_LINK),
    "out of sequence packets": Rule(
        "rate", 1000, "look at the fabric's congestion control (PFC, ECN)"
    ),
    "RDMA timeouts": Rule("rate", 10, "look for a failing link or switch on the way"),
    # The host itself.
    "available memory": Rule(
        "low level", 5, "fewer or smaller readers of data, or a host with more memory", 3, "%"
    ),
    "pages swapped in": Rule("count", 25_000, "end other programs of the host, or turn swap off"),
    "open files": Rule("level", 80, "a higher limit: ulimit -n", 3, "% of the limit"),
    "free disk": Rule("low level", 5, "make room, or another --out", 3, "%"),
}
"""Judgement of every counter, by its name. Limits are ours where no comment gives a source: high
enough that a clean run of weeks meets none, as far as the public reports of runs tell."""

XID_ADVICE = {
    13: "the program, or the GPU's memory: run it once more elsewhere",
    31: "the program addressed memory that it does not have; another GPU shows whether it is the "
    "program",
    48: "an uncorrectable memory error: reset the GPU, and replace it where it comes again",
    63: "a row was remapped: reset the GPU when the run has ended",
    64: "a row could not be remapped: replace the GPU",
    74: "an NVLink error: cordon the host and have the link looked at",
    79: "the GPU has fallen off the bus: cordon the host and reboot it",
    92: "many corrected memory errors: replace the GPU soon",
    94: "a contained memory error: the program is lost, reset the GPU",
    95: "an uncontained memory error: reset the GPU",
    119: "the GPU's firmware does not answer: reset the GPU, or reboot the host",
    120: "an error of the GPU's firmware: reset the GPU, or reboot the host",
}
"""What to do after an Xid, by its number (NVIDIA, "Xid errors", catalog)."""


def rule_of(name: str) -> Rule:
    """Returns the rule of a counter: `Xid 79` has that of Xid errors with the advice
    of its number."""
    family, _, number = name.partition(" ")
    if family == "Xid" and number.isdigit():
        rule = RULES["Xid errors"]
        return dataclasses.replace(rule, advice=XID_ADVICE.get(int(number), rule.advice))
    return RULES[name]
