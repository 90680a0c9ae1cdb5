"""Where the Meshwright that runs here was installed from, so that other hosts install the same (PEP 610)."""

import json
from importlib.metadata import Distribution
from urllib.parse import unquote, urlparse

from meshwright.errors import ConfigError

REMOTE_SOURCE = "/tmp/meshwright-source"
"""Folder of a host that a checkout is copied to."""


def requirement(distribution: Distribution, extra: str) -> tuple[str, str | None]:
    """Returns what pip installs on a host, and the folder here that REMOTE_SOURCE is a copy of, None for no copy.

    distribution: the installed package.  extra: "tpu", "cuda13" or "".
    Raises ConfigError where it was installed from a file that other hosts do not have.
    """
    name, extras = distribution.metadata["Name"], f"[{extra}]" if extra else ""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin:
        return f"{name}{extras}=={distribution.version}", None
    if version_control := origin.get("vcs_info"):
        return f"{name}{extras} @ {version_control['vcs']}+{origin['url']}@{version_control['commit_id']}", None
    if "dir_info" in origin:
        return f"{REMOTE_SOURCE}{extras}", unquote(urlparse(origin["url"]).path)
    if origin["url"].startswith("file:"):
        raise ConfigError(
            "--on skypilot without an image", f"{name} was installed here from {origin['url']}, which no node has",
            "--image IMAGE with it, or install it here from its checkout",
        )  # fmt: skip
    return f"{name}{extras} @ {origin['url']}", None
