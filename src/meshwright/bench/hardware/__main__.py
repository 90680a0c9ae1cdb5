"""Process of one section: `python -m meshwright.bench.hardware FOLDER SECTION SECONDS`, started
by `run.py`."""

import sys
import time
import traceback
from pathlib import Path

import jax

from meshwright.bench.hardware.run import SECTIONS
from meshwright.bench.hardware.section import Request, Section, describe, end_with_parent
from meshwright.hardware.mesh import prepare_host
from meshwright.plugins import resolve
from meshwright.trust import take_options


def main(folder: str, name: str, seconds: str) -> int:
    """Runs a section; the exit code is 0 where its file tells how it ended."""
    end_with_parent()
    began = time.perf_counter()
    request = Request.read(Path(folder))
    section = Section(name, request, float(seconds))
    section.save()
    try:
        prepare_host(request.devices)
        jax.devices()
        section.facts["start_seconds"] = time.perf_counter() - began
        resolve("section", SECTIONS.get(name, (name, 0))[0], {})(section)
    except Exception as error:
        traceback.print_exc()
        section.finish(describe(error))
        return 0
    section.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(*take_options(sys.argv[1:])))
