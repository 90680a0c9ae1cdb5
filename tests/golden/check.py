"""Writes the golden files anew and compares them with the committed ones: `make golden-check`.

Ends with 1 where an array differs by more than 1e-5 of its largest element, or more of a description than versions.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))

from drawn import FILES, NOT_SCRIPTS, read

TOLERANCE = 1e-5
NAMED_AT_RANDOM = ("maxtext-checkpoint", "megatron-checkpoint")
"""Golden files of files that have random names, or contain one: only their descriptions are compared."""


def main() -> int:
    worst, failed = 0.0, []
    with tempfile.TemporaryDirectory() as name:
        for script in sorted(set(PEERS.glob("*.py")) - {PEERS / file for file in NOT_SCRIPTS}):
            subprocess.run([sys.executable, str(script), name], check=True, cwd=PEERS)
        for file in sorted(FILES.glob("*.npz")):
            (old, arrays), (new, again) = read(file.stem), read(file.stem, Path(name))
            for about in (old, new):
                del about["versions"], about["arrays_sha256"]
            if old != new or (sorted(arrays) != sorted(again) and file.stem not in NAMED_AT_RANDOM):
                failed.append(f"{file.stem}: its description differs")
                continue
            if file.stem in NAMED_AT_RANDOM:
                continue
            for key, values in arrays.items():
                size = max(float(np.abs(values).max(initial=0)), 1e-30)
                gap = float(np.abs(again[key].astype(np.float64) - values).max(initial=0)) / size
                worst = max(worst, gap)
                if gap > TOLERANCE:
                    failed.append(f"{file.stem}: {key} differs by {gap:.1e} of its largest element")
    print(f"largest difference: {worst:.1e} of the largest element of an array")
    print("\n".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
