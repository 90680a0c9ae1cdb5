"""The train step of nanoGPT's CPU setting, by turns with eager PyTorch's: `python bench/nanogpt_step.py PYTHON`.

PYTHON is an interpreter that has torch. Both sides run on the same cores in one run (turns.py); the result is a ratio.
"""

import json
import os
import sys
from pathlib import Path

import turns

HERE = Path(__file__).parent


def main(python: str, rounds: int) -> None:
    ours = [sys.executable, str(HERE / "our_step.py"), "nanogpt-cpu", "1", "--model.vocab", "66"]
    sides = {
        "meshwright": (ours, os.environ),
        "torch": ([python, str(HERE / "torch_nanogpt.py")], os.environ),
    }
    found = turns.summary(turns.by_turns(sides, rounds=rounds), "meshwright", "torch")
    print(turns.line_of(found, "meshwright", "torch"))
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30)
