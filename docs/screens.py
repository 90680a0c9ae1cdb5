"""Makes the screens of the pages in docs/img/pages: each page small and large, at 1280 and 390 pixels, light and dark.

`python docs/screens.py [--meshwright COMMAND] [NAME...]` writes the pages by the verbs themselves and photographs them
with Chromium. Two short trainings are run for the page of runs. Proving for TPUs needs libtpu: COMMAND may be the
`python -m meshwright` of another environment.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent / "img" / "pages"
LARGE = ["llama3-405b", "--mesh", "fsdp=128,tensor=8"]
PAGES = {
    "plan": ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--tokens-per-step", "1M"],
    "plan-405b": ["plan", "llama3-405b", "--on", "v5p:8x8x16", "--tokens-per-step", "4M"],
    "offers": ["plan", "llama3-8b", "--on", "v5p:4x4x4,v6e:8x8,h100:64,b200:32,v5e:2x2", "--tokens-per-step", "1M"],
    "proof": ["prove", "tiny", "--mesh", "data=2,fsdp=2,tensor=2"],
    "proof-405b": ["prove", *LARGE, "--on", "v5p:8x8x16"],
    "show": ["show", "llama3-8b", "--mesh", "stage=4,fsdp=2,tensor=2", "--training.microbatches", "8"],
    "show-405b": ["show", *LARGE, "--machine", "v5p:8x8x16"],
    "difference": ["prove", "tiny", "--mesh", "data=2,fsdp=2,tensor=2", "--against", "fsdp=8"],
    "run": ["view", "fsdp", "tensor"],
}
"""Name of a screen -> words of the command that makes its page."""
TRAIN = ["train", "tiny", "--model.layers", "2", "--steps", "40", "--data.sample", "0", "--training.eval-every", "10"]
BEFORE = [
    [*TRAIN, "--mesh", "tensor=2", "--devices", "2", "--lr", "1e-3", "--out", "tensor"],
    [*TRAIN, "--mesh", "fsdp=4", "--devices", "4", "--profile", "20:22", "--out", "fsdp"],
]
"""Words of the commands that the page of runs needs."""
ANCHORS = {"difference": "#difference"}
"""Name of a screen -> section that it begins with."""
SIZES = {1280: 1500, 390: 1500}
"""Width -> height of a screen."""


def main() -> None:
    """Writes the pages and their screens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshwright", default=f"{sys.executable} -m meshwright", help="command of meshwright")
    parser.add_argument("names", nargs="*", default=[*PAGES], choices=[*PAGES, []], help="screens to make")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        meshwright = shlex.split(options.meshwright)
        for words in BEFORE if "run" in options.names else ():
            subprocess.run([*meshwright, *words], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        for name in options.names:
            page = Path(folder) / f"{name}.html"
            command = [*meshwright, *PAGES[name], "--html", str(page)]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            for width, height in SIZES.items():
                for theme in ("light", "dark"):
                    tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
                    tab.goto(page.as_uri() + ANCHORS.get(name, ""))
                    tab.wait_for_selector("html[data-ready]")
                    tab.wait_for_timeout(300)
                    picture = Image.open(BytesIO(tab.screenshot()))
                    tab.close()
                    picture.save(FOLDER / f"{name}-{width}-{theme}.webp", quality=80, method=6)
            print(f"{name}: {page.stat().st_size / 1e6:.2f} MB")
        chromium.close()


if __name__ == "__main__":
    main()
