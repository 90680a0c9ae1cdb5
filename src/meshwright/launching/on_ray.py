"""Program of a Ray job: one process on each of several nodes, started again where that helps.

Run by `ray job submit` (see `ray_job`), with the specification of the job as its argument.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from meshwright.launching.exit_codes import restarts
from meshwright.launching.ray_job import Specification, decode

_GRACE = 150
"""Seconds that processes have to end after the first has failed."""

_stopped: list[bool] = []
"""Not empty once the job was asked to stop: it is not started again."""


class Node:
    """Process on one node of the cluster."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Returns this node's address with a port that is free."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """Runs the command to its end; returns its exit code, 128 + N after signal N."""
        self._process = subprocess.Popen(command, env={**os.environ, **environment})
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self) -> None:
        """Asks the process to save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def run(job: Specification) -> int:
    """Runs the job on the cluster that this process belongs to; returns its exit code."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address="auto", log_to_driver=True)
    resources = {str(name): float(number) for name, number in job["resources"].items()}
    group = placement_group([{"CPU": 1.0, **resources}] * job["hosts"], strategy="STRICT_SPREAD")
    print(f"waiting for {job['hosts']} nodes with {resources or 'a CPU'} each", flush=True)
    ray.get(group.ready())
    gpus = resources.pop("GPU", 0)
    options = {"num_cpus": 1, "num_gpus": gpus, "resources": resources, "max_concurrency": 2}
    code = 0
    for start in range(job["restarts"] + 1):
        nodes = [
            ray.remote(Node).options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
            for i in range(job["hosts"])
        ]
        code = _run_once(ray, nodes, job, "TPU" in resources)
        for node in nodes:
            ray.kill(node)
        if not restarts(code) or _stopped or start == job["restarts"]:
            break
        print(f"exit code {code}: start {start + 2} of at most {job['restarts'] + 1}", flush=True)
    return code


def _run_once(ray: Any, nodes: list[Any], job: Specification, tpu: bool) -> int:
    """Runs all processes; returns the first exit code that is not 0, of a dead node 137."""
    address = ray.get(nodes[0].address.remote())

    def environment(process: int) -> dict[str, str]:
        together = {
            "MESHWRIGHT_COORDINATOR": address,
            "MESHWRIGHT_PROCESSES": str(len(nodes)),
            "MESHWRIGHT_PROCESS": str(process),
        }
        # The order of TPU hosts is that of their slice, which they know.
        return job["environment"] if tpu or len(nodes) == 1 else {**together, **job["environment"]}

    running = {node.run.remote(job["command"], environment(i)): i for i, node in enumerate(nodes)}
    first, deadline = 0, float("inf")

    def stop() -> None:
        for index in running.values():
            nodes[index].stop.remote()

    def stopped(*_: object) -> None:
        _stopped.append(True)
        stop()

    signal.signal(signal.SIGTERM, stopped)  # `ray job stop`
    while running and time.monotonic() < deadline:
        ended, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        if not ended:
            continue
        process = running.pop(ended[0])
        try:
            code = int(ray.get(ended[0]))
        except ray.exceptions.RayError as error:
            print(f"process {process}: its node is gone: {str(error).splitlines()[0]}", flush=True)
            code = 137
        if code and not first:
            print(f"process {process} ended first, with exit code {code}", flush=True)
            first, deadline = code, time.monotonic() + _GRACE
            stop()
    return first


if __name__ == "__main__":
    sys.exit(run(decode(sys.argv[1])))
