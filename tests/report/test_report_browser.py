"""The report as a browser shows it: wide and narrow, by day and by night."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from matplotlib.image import imread
from rich.console import Console

from bondgrad.report import report_command
from tests.report.synthetic_results import write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

SIZES = [(1280, 900), (375, 812)]
SCHEMES = {"light": "1", "dark": "0"}

# The page in a frame: a window cannot be as narrow as a phone.
AROUND = """<!doctype html><title>around</title><pre id="measured"></pre>
<iframe style="border: 0" width="{width}" height="{height}" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = frames[0], all = selector => [...page.document.querySelectorAll(selector)];
  const boxes = all("figure svg").map(svg => svg.getBoundingClientRect());
  document.querySelector("#measured").textContent = JSON.stringify({{
    width: page.innerWidth, needed: page.document.documentElement.scrollWidth,
    figures: boxes.map(box => [box.left, box.right, box.height]),
    taps: all("nav a, details > summary").map(link => link.getBoundingClientRect().height),
    night: page.matchMedia("(prefers-color-scheme: dark)").matches,
  }});
}});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    folder = tmp_path_factory.mktemp("browser")
    write(folder / "results")
    report_command(folder / "results", folder / "page", Console(quiet=True))
    return folder / "page" / "index.html"


def chromium(path, size, scheme, folder, *options):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"]
    flags += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--force-device-scale-factor=1"]
    command = [CHROMIUM, *flags, *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def measured(text, size, scheme, folder):
    """What the browser measures, and what it complains about."""
    around = folder / "around.html"
    around.write_text(AROUND.format(width=size[0], height=size[1], page=escape(text)))
    done = chromium(around, (1400, 1000), scheme, folder, "--dump-dom")
    found = json.loads(unescape(re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)[1]))
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("size", "scheme"), [(SIZES[0], "light"), (SIZES[1], "dark")])
def test_the_page_fits(page, size, scheme, tmp_path):
    found, complaints = measured(page.read_text(), size, scheme, tmp_path)
    assert complaints == []
    assert found["night"] == (scheme == "dark")
    assert found["needed"] <= found["width"] == size[0]
    assert len(found["figures"]) == page.read_text().count("<svg") == 7
    for left, right, height in found["figures"]:
        assert 0 <= left < right <= size[0]
        assert right - left > 300
        assert height > 80
    assert min(found["taps"]) >= (44 if size == SIZES[1] else 24)


def test_what_does_not_fit_is_seen(page, tmp_path):
    """The checks above fail where they should."""
    wide = '<div style="width: 500px">wide</div><script>nothing.at.all</script></body>'
    found, complaints = measured(page.read_text().replace("</body>", wide), SIZES[1], "light", tmp_path)
    assert found["needed"] >= 500
    assert "nothing is not defined" in complaints[0]


@pytest.mark.parametrize(("size", "scheme"), [(SIZES[0], "dark"), (SIZES[1], "light")])
def test_the_page_is_seen(page, size, scheme, tmp_path):
    # High enough that figures are in it.
    chromium(page, (size[0], 3000), scheme, tmp_path, f"--screenshot={tmp_path / 'shot.png'}")
    picture = imread(tmp_path / "shot.png")[:, :, :3]
    assert picture.shape[:2] == (3000, size[0])
    assert len({colour.tobytes() for colour in picture.reshape(-1, 3)}) > 200
    assert (picture[0, 0].mean() > 0.5) == (scheme == "light")
