"""Pages of runs in a real browser: a training that restarts while it is watched, hostile names, several runs."""

import http.client
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import sync_playwright
from test_cli import SMALL, meshwright
from written_run import BATCH, SEQ, STEPS, write_run

import meshwright as mw
from meshwright.activity import activity, watched_by
from meshwright.errors import ConfigError
from meshwright.reporters.files import EventLog, JsonLines
from meshwright.views.live_server import LivePage, LiveServer
from meshwright.views.run_folder import RunFolder, flat_fields
from meshwright.views.run_page import run_page

_BROWSER = next(
    (path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(
    # CI installs one and sets this, so that there the tests cannot be left out.
    _BROWSER is None and not os.environ.get("MESHWRIGHT_BROWSER_TESTS"),
    reason="no Chromium on this machine; .ci/run installs one",
)
HOSTILE = "<img src=x onerror=\"document.title='broken'\"></script><script>document.title='broken'</script>"


@pytest.fixture
def tab() -> Iterator[Tab]:
    """A tab whose console has to stay silent."""
    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on(
            "console",
            lambda message: (
                said.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        yield page
        browser.close()
    assert said == []


@pytest.fixture
def served() -> Iterator[list[LiveServer]]:
    """Servers that a test starts, ended after it."""
    servers: list[LiveServer] = []
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def serve(served: list[LiveServer], *outs: Path) -> LiveServer:
    served.append(LiveServer(LivePage(outs, run_page)))
    threading.Thread(target=served[-1].serve_forever, daemon=True).start()
    return served[-1]


def written(out: Path, *, steps: int, loss: float = 4.0) -> Path:
    """A run's folder as the training loop writes it."""
    out.mkdir(parents=True, exist_ok=True)
    run = {"name": "tiny", "model": {"family": "llama"}, "training": {"steps": 100, "seq": 99}}
    (out / "run.json").write_text(json.dumps(run))
    train_on(out, 0, steps, loss)
    return out


def train_on(out: Path, start: int, steps: int, loss: float = 4.0) -> None:
    """Writes what a training from `start` to `steps` writes."""
    lines, events = JsonLines(out / "metrics.jsonl", upto=start), EventLog(out / "events.jsonl")
    with watched_by(events):
        events.start(
            start,
            mesh="data=2",
            devices=2,
            kind="cpu",
            processes=1,
            how="resume" if start else "fresh",
        )
        for step in range(start + 1, steps + 1):
            for sink in (lines, events):
                sink.write(step, {"loss": loss / step**0.5, "learning rate": 1e-3, "step seconds": 0.1,
                                  "gradient norm": 1.0, "tokens/s": 1e4, "input wait seconds": 0.01})  # fmt: skip
            if step % 10 == 0:
                with activity("save", "saving", "saved", step):
                    pass
        lines.write(steps, {"held-out loss": loss / steps**0.5})
        with activity("sample", "sampling", "sampled") as work:
            work.record["text"] = f"once upon a {HOSTILE}"
    lines.close()
    events.close()


def curve_of(tab: Tab) -> str:
    path = tab.locator("#curves svg path.line").first.get_attribute("d")
    assert path
    return path


@needs_browser
@pytest.mark.exhaustive
def test_a_training_is_watched_while_it_goes_on_and_restarts(
    tab: Tab, served: list[LiveServer], tmp_path: Path
) -> None:
    out = tmp_path / "watched"
    words = [*SMALL, "--devices", "1", "--data.sample", "5", "--training.save-every", "4"]
    meshwright("train", "--out", str(out), "--steps", "5", *words)
    tab.goto(serve(served, out).url)
    tab.get_by_text("ended", exact=True).first.wait_for()
    assert tab.locator(".figure-value").nth(1).inner_text() == "5"
    before = curve_of(tab)
    assert tab.get_by_text("restart at").count() == 0
    meshwright("train", "--out", str(out), "--resume", "--steps", "9")
    tab.locator(".figure-value").nth(1).filter(has_text=re.compile("^9$")).wait_for(timeout=90_000)
    tab.locator("#curves .mark-name", has_text="restart").first.wait_for()
    assert curve_of(tab).count("L") > before.count("L")


@needs_browser
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_of_two_runs(tab: Tab, tmp_path: Path, width: int) -> None:
    first, second = (
        written(tmp_path / "first", steps=40),
        written(tmp_path / HOSTILE.replace("/", "|"), steps=60),
    )
    (first / "evidence-step-7").mkdir()
    (first / "evidence-step-7" / "metrics.json").write_text(json.dumps({"reason": HOSTILE}))
    file = mw.view(first, second).write(tmp_path / "page.html")
    assert file.stat().st_size < 5 * 2**20
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(file.as_uri())
    assert tab.title() != "broken" and tab.evaluate("document.images.length") == 0
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    for text in ("bad step", "once upon a"):
        assert tab.get_by_text(text).first.is_visible()
    assert tab.get_by_role("heading", name="What differs between the runs").count() == 1
    assert tab.get_by_role("heading", name="differences from the recipe tiny").count() == 2
    chart = tab.locator("#curves .block-chart").first
    before = curve_of(tab)
    chart.get_by_role("button", name="log y").click()
    assert curve_of(tab) != before
    chart.locator("input[type=range]").fill("0.9")
    assert tab.locator("#curves svg path.line").count() >= 2


@needs_browser
@pytest.mark.exhaustive
def test_marks_and_curves_follow_what_is_written(
    tab: Tab, served: list[LiveServer], tmp_path: Path
) -> None:
    out = written(tmp_path / "grows", steps=20)
    tab.goto(serve(served, out).url)
    tab.get_by_text("ended", exact=True).first.wait_for()
    # The second start takes steps 11 to 20 again, which the metrics drop, and goes on.
    train_on(out, 10, 50)
    tab.locator(".figure-value", has_text="50").first.wait_for(timeout=90_000)
    assert tab.locator("#curves .mark-name", has_text="restart").first.is_visible()
    assert tab.get_by_text("1 restart").first.is_visible()


@needs_browser
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1280, 390])
def test_curves_follow_the_chosen_axis(tab: Tab, tmp_path: Path, width: int) -> None:
    """The choice is kept in the address, marks move with the curves, and no part is wider than the page."""
    file = mw.view(write_run(tmp_path / "run")).write(tmp_path / "page.html")
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(file.as_uri())
    loss = tab.locator("#curves .block-chart").first
    restart = loss.locator("line.mark").first
    of_steps, at_steps = curve_of(tab), restart.get_attribute("x1")
    tab.locator("#curves").get_by_role("button", name="tokens", exact=True).click()
    assert tab.evaluate("location.hash") == "#?x=tokens"
    assert loss.locator(".axis-name", has_text="tokens").count() == 1
    # Each step has as many tokens: the picture is that of steps, to a pixel.
    assert abs(float(restart.get_attribute("x1") or 0) - float(at_steps or 0)) < 1
    plot = loss.locator(".plot")
    plot.focus()
    tab.keyboard.press("ArrowRight")
    tip = tab.locator(".tip").inner_text()
    assert "tokens 2.05 k" in tip and BATCH * SEQ == 2048
    assert re.search(r"step\s+1\b", tip)
    tab.keyboard.press("Escape")
    tab.locator("#curves").get_by_role("button", name="hours", exact=True).click()
    assert curve_of(tab) != of_steps
    # An hour of 1.45 lies between steps 400 and 401: the restart, in the middle by steps, is near the begin.
    assert float(restart.get_attribute("x1") or 0) < float(at_steps or 0) * 0.7
    tab.reload()
    pressed = tab.locator("#curves .segmented [aria-pressed=true]")
    assert pressed.all_inner_texts() == ["hours"]
    assert loss.locator(".axis-name", has_text="hours").count() == 1
    tab.locator("#curves").get_by_role("button", name="step", exact=True).click()
    assert "x=" not in tab.evaluate("location.hash") and curve_of(tab) == of_steps
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert tab.title().startswith(f"step {STEPS}, loss ")


def asked(
    server: LiveServer, path: str = "/", host: str | None = None, method: str = "GET"
) -> tuple[int, bytes]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_server_is_of_this_machine_alone(served: list[LiveServer], tmp_path: Path) -> None:
    server = serve(served, written(tmp_path / "mine", steps=3))
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server)[0] == asked(server, "/data.json", f"localhost:{port}")[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}.evil.example",
    ):
        assert asked(server, host=host)[0] == asked(server, "/data.json", host)[0] == 421
    for path in ("/run.json", "/../run.json", "/%2e%2e/etc/passwd", "/data.json?x", "http://evil/"):
        assert asked(server, path)[0] == 404
    assert asked(server, method="POST")[0] == 501
    with socket.socket() as probe:
        probe.settimeout(5)
        addresses = {
            info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)
        }
        for address in addresses - {"127.0.0.1", "127.0.1.1"}:
            assert probe.connect_ex((address, port)) != 0, f"the server listens on {address}"


def test_data_are_read_as_they_grow(tmp_path: Path) -> None:
    out = written(tmp_path / "run", steps=30)
    folder = RunFolder(out)
    folder.refresh()
    version, loss = folder.version, folder.curves["loss"]
    assert loss.count == 30
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 31, "loss": null}\n\xff\n[1]\n{"step": "x", "loss": 1}\n{"step": 32, "lo'
        )
    folder.refresh()
    assert (
        folder.version != version
        and list(loss.steps[-2:]) == [30.0, 31.0]
        and loss.values[-1] != loss.values[-1]
    )
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'ss": 0.5}\n')
    folder.refresh()
    assert loss.steps[-1] == 32.0 and loss.values[-1] == 0.5
    JsonLines(out / "metrics.jsonl", upto=20).close()  # a resume writes the file anew
    folder.refresh()
    assert len(folder.curves["loss"].steps) == 20


def test_a_file_that_leaves_the_folder_is_left_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"name": "secret", "training": {"steps": 1}}')
    out = written(tmp_path / "run", steps=3)
    (out / "run.json").unlink()
    (out / "run.json").symlink_to(secret)
    assert "secret" not in json.dumps(mw.view(out).page.to_json())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no run.json"):
        mw.view(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        mw.view(tmp_path / "absent")


def test_a_mesh_is_one_field() -> None:
    degrees = {"stage": 1, "fsdp": 4, "tensor": 2, "slices": 1, "dcn_axis": "data"}
    assert flat_fields({"mesh": degrees, "a": {"b": None}}) == {
        "mesh": "fsdp=4,tensor=2",
        "a.b": "none",
    }
    assert (
        flat_fields({"mesh": {**degrees, "slices": 2}})["mesh"]
        == "fsdp=4,tensor=2,slices=2,dcn_axis=data"
    )
    assert flat_fields({"mesh": None}) == {"mesh": "none"}
