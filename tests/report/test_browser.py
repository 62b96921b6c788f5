"""The report of a small real run as a browser shows it, at the width of a desk and of a phone."""

import html
import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Opens the page in a frame of a given width and writes down what is to be seen in it.
PROBE = """<!DOCTYPE html><body style="margin:0"><iframe id="frame" style="border:0"></iframe>
<pre id="found"></pre><script>
const [page, width] = location.hash.slice(1).split(",");
const frame = document.getElementById("frame");
frame.width = width; frame.height = 4000;
frame.onload = () => {
  const doc = frame.contentDocument, root = doc.documentElement;
  const box = element => { const b = element.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom].map(v => Math.round(v * 10) / 10); };
  const all = selector => [...doc.querySelectorAll(selector)];
  document.getElementById("found").textContent = JSON.stringify({
    title: doc.title, text: doc.body.innerText, scroll: root.scrollWidth, width: root.clientWidth,
    charts: all("svg").map(svg => ({ title: svg.getAttribute("aria-label"), box: box(svg),
      labels: [...svg.querySelectorAll("text")].map(t => ({ text: t.textContent, box: box(t),
        size: parseFloat(getComputedStyle(t).fontSize) * svg.getScreenCTM().a })) })),
    tables: all("table").map(t => [...t.rows].map(r => [...r.cells].map(c => c.innerText))),
    pictures: all("img").map(i => i.naturalWidth),
    paper: getComputedStyle(doc.body).backgroundColor,
    strays: all("script, link, iframe").length });
};
frame.src = page;
</script></body>"""


@pytest.fixture(scope="module")
def browser():
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} (apt install chromium)")
    return found


@pytest.fixture(scope="module")
def site(drawn_run, tmp_path_factory):
    """A local server with the report of a real run; it notes what is asked for."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(drawn_run / "report", folder / "page")
    (folder / "probe.html").write_text(PROBE, encoding="utf-8")
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, template, *values):
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def look(browser, site, width, tmp_path, *options):
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
    ]
    command += ["--disable-dev-shm-usage", "--no-first-run", "--virtual-time-budget=8000"]
    command += [*options, "--window-size=1400,4100", "--dump-dom"]
    address = f"{site}/probe.html#page/index.html,{width}"
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def overlapping(labels):
    """Pairs of labels of a chart that lie on each other, by more than the air around letters."""
    pairs = []
    for index, one in enumerate(labels):
        for other in labels[:index]:
            a, b = one["box"], other["box"]
            wide = min(a[2], b[2]) - max(a[0], b[0])
            high = min(a[3], b[3]) - max(a[1], b[1])
            if wide > 2 and high > 5:
                pairs.append((one["text"], other["text"]))
    return pairs


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_whole_report(browser, site, tiny_run, tmp_path, width):
    address, asked = site
    asked.clear()
    seen = look(browser, address, width, tmp_path)
    results = json.loads((tiny_run / "results.json").read_text())

    assert seen["title"] == "cldetr, 3+1"
    for heading in (
        "Results",
        "AP over phases",
        "What was forgotten, what was learnt",
        "Category distribution",
        "Pictures",
        "Training curves",
        "Time and memory",
        "Data and split",
        "Settings",
        "Provenance",
    ):
        assert heading in seen["text"]
    [last] = [row for row in seen["tables"][0] if row[0] == "after phase 2"]
    assert last[2] == f"{results['phases'][1]['all']['AP']:.1f}"
    assert seen["tables"][0][-1][0] == "FPP"
    assert seen["pictures"] == [160]

    assert width - 20 < seen["width"] <= width  # less a scroll bar
    assert seen["scroll"] <= seen["width"]  # nothing sticks out
    assert len(seen["charts"]) >= 10
    for chart in seen["charts"]:
        left, top, right, bottom = chart["box"]
        assert right - left > 300
        assert bottom - top > 80
        assert right <= width
        assert chart["labels"], chart["title"]
        assert min(label["size"] for label in chart["labels"]) > 8.5
        assert overlapping(chart["labels"]) == [], chart["title"]
        for label in chart["labels"]:
            assert label["box"][0] >= left - 1, label
            assert label["box"][2] <= right + 1, label
    categories = set(results["phases"][1]["per_category"])
    drawn = {label["text"] for chart in seen["charts"] for label in chart["labels"]}
    assert categories <= drawn

    assert seen["strays"] == 0
    allowed = {"/probe.html", "/page/index.html", "/favicon.ico"}
    assert {path.partition("#")[0] for path in asked} <= allowed


def test_the_page_follows_a_dark_screen(browser, site, tmp_path):
    dark = look(browser, site[0], 800, tmp_path, "--blink-settings=preferredColorScheme=0")
    light = look(browser, site[0], 800, tmp_path, "--blink-settings=preferredColorScheme=1")
    assert light["paper"] == "rgb(255, 255, 255)"
    assert dark["paper"] == "rgb(20, 24, 29)"
