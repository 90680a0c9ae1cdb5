"""Counters of NVIDIA GPUs, by NVML (the package nvidia-ml-py)."""

from collections import Counter as Counts
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.monitoring.counters import Counter, NotThere

_PACKAGE = "pip install nvidia-ml-py"


def open_nvidia() -> "NvidiaCounters":
    """Opens the counters of the host's GPUs. Raises NotThere."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        raise NotThere
    try:
        import pynvml
    except ImportError as error:
        raise NotThere(_PACKAGE) from error
    try:
        return NvidiaCounters(pynvml)
    except pynvml.NVMLError as error:
        raise NotThere(f"NVML does not start: {error}") from error


class NvidiaCounters:
    """GPUs of a host, and their links."""

    name = "NVIDIA GPUs"

    def __init__(self, nvml: Any):
        """Takes the module `pynvml`, or what has its functions."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpus: dict[str, Any] = {}
        self._part_of_bus: dict[str, str] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            part = self._describe(index, handle, bus)
            self._gpus[part] = handle
            self._part_of_bus[bus] = part
        self._events = self._watch_xids()

    def read(self) -> Iterator[Counter]:
        """Reads every counter of every GPU."""
        yield from self._read_xids()
        for part, handle in self._gpus.items():
            yield from self._read_gpu(part, handle)
            yield from self._read_links(part, handle)

    def _describe(self, index: int, handle: Any, bus: str) -> str:
        """Names a GPU so that it can be found in a rack: `GPU 3 (NVIDIA H100, serial 1650,
        0000:5D:00.0)`."""
        name = _text(self._nvml.nvmlDeviceGetName(handle))
        serial = self._ask("nvmlDeviceGetSerial", handle)
        identity = [name, bus]
        if serial is not None:
            identity.insert(1, f"serial {_text(serial)}")
        return f"GPU {index} ({', '.join(identity)})"

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Returns what a function of NVML answers;
        None where the device or the driver has no such thing."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def _watch_xids(self) -> Any:
        """Asks the driver to keep its Xid errors for this process; None where it refuses."""
        events = self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        for handle in self._gpus.values():
            self._ask(
                "nvmlDeviceRegisterEvents", handle, self._nvml.nvmlEventTypeXidCriticalError, events
            )
        return events

    def _read_xids(self) -> Iterator[Counter]:
        """Counts the Xid errors since the last reading, by GPU and number."""
        counts = Counts[tuple[str, int]]()
        while self._events is not None:
            event = self._ask("nvmlEventSetWait_v2", self._events, 0)
            if event is None:  # no further one waits
                break
            bus = _text(self._nvml.nvmlDeviceGetPciInfo(event.device).busId)
            counts[self._part_of_bus.get(bus, f"GPU {bus}"), int(event.eventData)] += 1
        for (part, number), count in counts.items():
            yield Counter(part, f"Xid {number}", count)

    def _read_gpu(self, part: str, handle: Any) -> Iterator[Counter]:
        nvml = self._nvml
        try:
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            is_lost = error.value == nvml.NVML_ERROR_GPU_IS_LOST
            yield Counter(part, "lost", float(is_lost))
            if is_lost:
                return
        else:
            yield Counter(part, "lost", 0)
            yield Counter(part, "temperature", temperature)
            slowdown = self._ask(
                "nvmlDeviceGetTemperatureThreshold",
                handle,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            )
            if slowdown is not None:
                yield Counter(part, "degrees below slowdown", slowdown - temperature)
        volatile = nvml.NVML_VOLATILE_ECC
        for name, kind in (
            ("uncorrected ECC errors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ("corrected ECC errors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ):
            errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, volatile)
            if errors is not None:
                yield Counter(part, name, errors)
        remapped = self._ask("nvmlDeviceGetRemappedRows", handle)
        if remapped is not None:
            _, _, pending, failed = remapped
            yield Counter(part, "row remappings pending", pending)
            yield Counter(part, "failed row remappings", failed)
        replays = self._ask("nvmlDeviceGetPcieReplayCounter", handle)
        if replays is not None:
            yield Counter(part, "PCIe replays", replays)
        yield from self._read_clock(part, handle)

    def _read_clock(self, part: str, handle: Any) -> Iterator[Counter]:
        """Reads the clock of a GPU that works, and why it is low.

        A software power cap is what a busy GPU always has.
        """
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            return
        clock = self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        if clock is not None and not reasons & nvml.nvmlClocksEventReasonGpuIdle:
            yield Counter(part, "SM clock", clock)
        heat = nvml.nvmlClocksEventReasonSwThermalSlowdown
        heat |= nvml.nvmlClocksEventReasonHwThermalSlowdown
        yield Counter(part, "slowed by heat", float(bool(reasons & heat)))
        brake = nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
        yield Counter(part, "slowed by power", float(bool(reasons & brake)))

    def _read_links(self, part: str, handle: Any) -> Iterator[Counter]:
        """Reads the errors of each NVLink,
        and how many links are down on a GPU that has some up."""
        nvml = self._nvml
        up = 0
        down = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                continue
            if not state:
                down += 1
                continue
            up += 1
            for name, errors in self._link_errors(handle, link):
                yield Counter(f"{part}, NVLink {link}", name, errors)
        if up:
            yield Counter(part, "NVLinks down", down)

    def _link_errors(self, handle: Any, link: int) -> Iterator[tuple[str, float]]:
        """Yields the errors of a link.
        Recoveries of NVLink 5 are a field, earlier ones a counter."""
        nvml = self._nvml
        recoveries = self._ask(
            "nvmlDeviceGetNvLinkErrorCounter", handle, link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY
        )
        if recoveries is None:
            recoveries = self._field(
                handle, nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, link
            )
        counted = {
            "NVLink recoveries": recoveries,
            "NVLink replays": self._ask(
                "nvmlDeviceGetNvLinkErrorCounter", handle, link, nvml.NVML_NVLINK_ERROR_DL_REPLAY
            ),
            "NVLink CRC errors": self._ask(
                "nvmlDeviceGetNvLinkErrorCounter", handle, link, nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT
            ),
        }
        for name, errors in counted.items():
            if errors is not None:
                yield name, errors

    def _field(self, handle: Any, field: int, link: int) -> float | None:
        """Returns a field of a link; None where the device has none."""
        values = self._ask("nvmlDeviceGetFieldValues", handle, [(field, link)])
        if values is None or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return float(values[0].value.ullVal)


def _text(value: str | bytes) -> str:
    """Returns a text of NVML, which older versions of its package give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
