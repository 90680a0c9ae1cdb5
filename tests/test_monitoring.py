"""Counters of a machine: read from fakes with the same functions, judged by their history, told where a run is watched."""

import json
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.launching.host_checks import check_counters
from meshwright.monitoring import watch
from meshwright.monitoring.counters import RULES, XID_ADVICE, Counter, NotThere, rule_of
from meshwright.monitoring.history import HOUR, History
from meshwright.monitoring.host import HostCounters
from meshwright.monitoring.nvidia import NvidiaCounters, open_nvidia
from meshwright.monitoring.tpu import TpuCounters
from meshwright.trainer import opening

H100 = "GPU 0 (NVIDIA H100 80GB HBM3, serial 1650524, 00000000:5D:00.0)"
LINK = f"{H100}, NVLink 14"


class NvmlError(Exception):
    def __init__(self, value: int):
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """One H100 with 18 links, as `pynvml` shows it; what a test changes are the attributes in lower case."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_CLOCK_SM = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_ERROR_DL_REPLAY = 0
    NVML_NVLINK_ERROR_DL_RECOVERY = 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS = 215
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonGpuIdle = 0x1
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.lost = False
        self.remapped = (0, 0, 0, 0)
        self.reasons = 0
        self.ecc = {0: 0, 1: 0}
        self.recoveries = dict.fromkeys(range(18), 0)
        self.down: set[int] = set()
        self.xids: list[int] = []
        self.has_nvlink_5 = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=b"00000000:5D:00.0")

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetSerial(self, handle: Any) -> str:
        return "1650524"

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        if self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return 61

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: int) -> int:
        return 87

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return self.ecc[kind]

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        return self.remapped

    def nvmlDeviceGetPcieReplayCounter(self, handle: Any) -> int:
        raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self.reasons

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        if link >= 18:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return int(link not in self.down)

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: Any, link: int, counter: int) -> int:
        if self.has_nvlink_5:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.recoveries[link] if counter == self.NVML_NVLINK_ERROR_DL_RECOVERY else 0

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[tuple[int, int]]) -> Any:
        ((field, link),) = fields
        assert field == self.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
        value = SimpleNamespace(ullVal=self.recoveries[link])
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: Any) -> None:
        pass

    def nvmlEventSetWait_v2(self, events: Any, timeout: int) -> Any:
        if not self.xids:
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device="handle 0", eventData=self.xids.pop())


def texts_of(nvml: FakeNvml, *changes: Any) -> list[str]:
    """Reads a GPU once a minute, with a change before each reading but the first; returns the warnings."""
    source, history = NvidiaCounters(nvml), History()
    found = history.add(0.0, source.read())
    for minute, change in enumerate(changes, start=1):
        change()
        found += history.add(60.0 * minute, source.read())
    return [warning.text for warning in found]


def nothing() -> None:
    pass


def test_a_healthy_gpu_is_read_and_gives_no_warning() -> None:
    source = NvidiaCounters(FakeNvml())
    values = {(c.part, c.name): c.value for c in source.read()}
    assert values[H100, "temperature"] == 61
    assert values[H100, "degrees below slowdown"] == 26
    assert values[LINK, "NVLink recoveries"] == 0
    assert (H100, "PCIe replays") not in values  # not supported by this one
    assert len([key for key in values if key[1] == "NVLink recoveries"]) == 18
    assert texts_of(FakeNvml(), nothing, nothing, nothing) == []


@pytest.mark.parametrize("has_nvlink_5", [False, True])
def test_a_link_that_recovers_is_named_with_its_gpu(has_nvlink_5: bool) -> None:
    """A run on 704 GPUs lost a day to a link with 505 recoveries in an hour that nobody looked at."""
    nvml = FakeNvml()
    nvml.has_nvlink_5 = has_nvlink_5

    def recover() -> None:
        nvml.recoveries[14] += 9

    texts = texts_of(nvml, recover, *[recover] * 56)
    assert texts[0].startswith(f"{LINK}: 9 NVLink recoveries in 1 min: cordon the host")
    assert texts[1].startswith(f"{LINK}: 90 NVLink recoveries in 10 min")
    assert len(texts) == 2  # again only where it has grown tenfold


FAULTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "fallen off the bus": ({"lost": True}, 1, f"{H100}: lost 1: cordon the host"),
    "rows cannot be remapped": (
        {"remapped": (0, 1, 0, 1)},
        1,
        f"{H100}: failed row remappings 1: replace the GPU",
    ),
    "memory error": (
        {"ecc": {0: 0, 1: 2}},
        1,
        f"{H100}: 2 uncorrected ECC errors in 1 min: cordon",
    ),
    "hot": ({"reasons": 0x40}, 3, f"{H100}: slowed by heat 1: have the cooling"),
    "power brake": ({"reasons": 0x80}, 3, f"{H100}: slowed by power 1: have the cooling"),
    "a link down": ({"down": {3}}, 1, f"{H100}: NVLinks down 1: cordon the host"),
    "Xid": ({"xids": [79]}, 1, f"{H100}: Xid 79 1 since the last reading: {XID_ADVICE[79]}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sick_gpu_is_named(fault: str) -> None:
    changes, readings, text = FAULTS[fault]
    nvml = FakeNvml()

    def break_it() -> None:
        for name, value in changes.items():
            setattr(nvml, name, value)

    found = texts_of(nvml, break_it, *[nothing] * (readings - 1))
    assert len(found) == 1
    assert found[0].startswith(text)


def test_an_xid_of_the_first_reading_is_not_lost() -> None:
    nvml = FakeNvml()
    nvml.xids = [48, 48, 94]
    source, history = NvidiaCounters(nvml), History()
    assert {w.name: w.value for w in history.add(0.0, source.read())} == {"Xid 48": 2, "Xid 94": 1}
    assert history.add(60.0, source.read()) == []


def test_a_gpu_whose_clock_stays_below_the_others_is_named() -> None:
    clocks = {f"GPU {n}": 1980.0 for n in range(8)}
    history, found = History(), []
    for minute in range(6):
        clocks["GPU 5"] = 1500.0 if minute in (0, 3, 4, 5) else 1900.0
        counters = [Counter(part, "SM clock", clock) for part, clock in clocks.items()]
        found += history.add(60.0 * minute, counters)
    assert [warning.part for warning in found] == ["GPU 5"]
    assert "1500 MHz, 76% of the median of all" in found[0].text


def test_a_gpu_that_does_not_work_has_no_clock_to_compare() -> None:
    nvml = FakeNvml()
    nvml.reasons = nvml.nvmlClocksEventReasonGpuIdle
    assert "SM clock" not in {counter.name for counter in NvidiaCounters(nvml).read()}


class FakeTpuMonitoring:
    def __init__(self, link: int):
        self.rows = {
            "ici_link_health": ["tray1.chip3.ici0.int: 0", f"tray1.chip3.ici1.int: {link}"],
            "tpu_throttle_score": ["0", "0"],
        }

    def list_supported_metrics(self) -> list[str]:
        return [*self.rows, "duty_cycle_pct", "tcp_min_rtt"]

    def get_metric(self, name: str) -> Any:
        return SimpleNamespace(data=lambda: self.rows[name])


def test_a_tpu_link_that_lasts_unhealthy_is_named() -> None:
    history = History()
    sick = TpuCounters(FakeTpuMonitoring(7))
    found = [w for minute in range(4) for w in history.add(60.0 * minute, sick.read())]
    assert [(w.part, w.value) for w in found] == [("TPU tray1.chip3.ici1.int", 7)]
    well = TpuCounters(FakeTpuMonitoring(0))
    assert not [w for minute in range(4) for w in History().add(60.0 * minute, well.read())]


def write_tree(root: Path, **changes: int) -> None:
    """Writes what a host with one interface and one RDMA adapter has below /proc and /sys."""
    counts = {"carrier_down_count": 1, "rx_errors": 0, "link_downed": 0, "retransmitted": 100}
    counts |= changes
    files = {
        "sys/class/net/eth0/carrier_down_count": counts["carrier_down_count"],
        "sys/class/net/eth0/statistics/rx_errors": counts["rx_errors"],
        "sys/class/net/eth0/device/vendor": "0x15b3",
        "sys/class/net/lo/statistics/rx_errors": 5,
        "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": counts["link_downed"],
        "proc/net/snmp": "Ip: Forwarding\nIp: 1\nTcp: ActiveOpens RetransSegs\n"
        f"Tcp: 12 {counts['retransmitted']}\n",
        "proc/meminfo": "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n",
        "proc/vmstat": "pswpin 0\n",
    }
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def test_a_hosts_counters_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    write_tree(tmp_path)
    values = {(c.part, c.name): c.value for c in HostCounters(None, tmp_path).read()}
    assert values == {
        ("interface eth0", "carrier losses"): 1,
        ("interface eth0", "receive errors"): 0,
        ("RDMA adapter mlx5_0, port 1", "link downed"): 0,
        ("TCP", "retransmitted segments"): 100,
        ("memory", "available memory"): 50,
        ("memory", "pages swapped in"): 0,
    }


def test_a_link_flap_and_a_burst_of_retransmissions_are_named(tmp_path: Path) -> None:
    history, source, found = History(), HostCounters(None, tmp_path), []
    for minute in range(60):
        burst = 400 * max(0, minute - 50)
        write_tree(
            tmp_path, retransmitted=100 + 2 * minute + burst, carrier_down_count=1 + (minute > 30)
        )
        found += history.add(60.0 * minute, source.read())
    assert {(w.part, w.name) for w in found} == {
        ("interface eth0", "carrier losses"),
        ("TCP", "retransmitted segments"),
    }
    retransmissions = next(w.text for w in found if w.part == "TCP")
    assert "120 an hour before" in retransmissions


@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_a_clean_host_gives_no_warning(seed: int) -> None:
    """Bursts of retransmissions, temperatures, single replays: what healthy machines have."""
    draw = random.Random(seed)
    history = History()
    retransmitted = replays = 0.0
    for minute in range(24 * 60):
        retransmitted += draw.expovariate(1 / 5)
        replays += draw.random() < 0.01
        values = {
            "retransmitted segments": retransmitted,
            "NVLink replays": replays,
            "slowed by heat": float(draw.random() < 0.01),
            "available memory": draw.uniform(20, 60),
            "degrees below slowdown": draw.uniform(8, 30),
        }
        assert history.add(60.0 * minute, [Counter("x", *item) for item in values.items()]) == []


def test_a_counter_that_was_reset_begins_anew() -> None:
    history = History()
    history.add(0.0, [Counter("link", "NVLink recoveries", 1000)])
    assert history.add(60.0, [Counter("link", "NVLink recoveries", 2)]) == []
    assert history.add(120.0, [Counter("link", "NVLink recoveries", 9)])[0].value == 9


def test_an_old_increase_is_forgotten_and_a_new_one_told_again() -> None:
    history = History()
    told = []
    for minute in range(200):
        errors = 3 if minute < 150 else 6
        if minute >= 10:
            told += history.add(60.0 * minute, [Counter("gpu", "uncorrected ECC errors", errors)])
        else:
            told += history.add(60.0 * minute, [Counter("gpu", "uncorrected ECC errors", 0)])
    assert [w.value for w in told] == [3, 3]
    assert HOUR == 3600


def test_every_warning_says_what_to_do() -> None:
    for name, rule in RULES.items():
        assert bool(rule.advice) == (rule.kind != "shown"), name
    assert rule_of("Xid 4242").advice == RULES["Xid errors"].advice


def test_hardware_without_its_interface_is_said_and_other_hosts_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources, missing = watch.open_sources(tmp_path)
    assert [source.name for source in sources] == ["host"]
    assert missing == {}

    def no_package() -> Any:
        raise NotThere("pip install nvidia-ml-py")

    monkeypatch.setattr(watch, "open_nvidia", no_package)
    assert watch.open_sources(tmp_path)[1] == {"NVIDIA GPUs": "pip install nvidia-ml-py"}
    with pytest.raises(NotThere, match=r"^$"):
        open_nvidia()


def test_doctor_judges_levels_and_not_counts() -> None:
    nvml = FakeNvml()
    nvml.remapped, nvml.ecc = (0, 1, 1, 0), {0: 500, 1: 2}
    findings = check_counters(list(NvidiaCounters(nvml).read()))
    assert [(f.verdict, f.found) for f in findings] == [
        ("warning", f"{H100}: row remappings pending 1")
    ]
    assert check_counters(list(NvidiaCounters(FakeNvml()).read()))[0].verdict == "ok"


class SickLink:
    """Source with a link that recovers a hundred times between two readings."""

    name = "fake"

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> Iterable[Counter]:
        self.readings += 1
        yield Counter("GPU 3, NVLink 14", "NVLink recoveries", 100 * self.readings)


class Store:
    """Key-value store of JAX's coordination service."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, overwrite: bool) -> None:
        self.texts[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [item for item in self.texts.items() if item[0].startswith(folder)]


def test_warnings_of_other_hosts_reach_the_events_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, events = Store(), list[tuple[str, dict[str, Any]]]()
    said = list[str]()
    monkeypatch.setattr(watch.last_words, "say", said.append)
    other = watch._Teller(None, store)
    first = watch._Teller(lambda event, **values: events.append((event, values)), store)
    machine = watch.MachineWatch(tmp_path, [SickLink()], other.tell)
    machine.look(0.0)
    machine.look(60.0)
    first.gather()
    first.gather()
    assert [(event, values["part"], values["value"]) for event, values in events] == [
        ("machine", "GPU 3, NVLink 14", 100)
    ]
    assert "GPU 3, NVLink 14: 100 NVLink recoveries in 1 min: cordon the host" in said[0]


def test_a_run_tells_of_a_sick_link_and_keeps_the_last_readings_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, has_looked = SickLink(), threading.Event()
    monkeypatch.setattr(watch, "open_sources", lambda out: ([source], {}))
    monkeypatch.setattr(watch, "PERIOD", 0.05)
    monkeypatch.setattr(opening, "build_reporters", lambda out, run: [Failing()])

    class Failing:
        def write(self, step: int, values: dict[str, float]) -> None:
            while source.readings < 4:
                has_looked.wait(0.05)
            raise RuntimeError("planted")

        def close(self) -> None:
            pass

    run = mw.recipe("tiny", steps=2, layers=1, batch=8, sample=0, eval_samples=16)
    out = tmp_path / "sick"
    with pytest.raises(RuntimeError, match="planted"):
        mw.train(run, out=out, progress="none", cache=tmp_path)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "machine"]
    assert told[0]["part"] == "GPU 3, NVLink 14"
    assert "NVLink recoveries" in capfd.readouterr().err
    kept = json.loads((out / "watchdog" / "machine-process-0.json").read_text())
    assert "NVLink recoveries" in kept["readings"][-1]["counters"]["GPU 3, NVLink 14"]
