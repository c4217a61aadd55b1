"""What pages look like: beside stored pictures, and with nothing cut off or covered, on a desk and on a phone.

The stored pictures are grey and small, so that letters are smudges: another font or version of the browser passes,
which `test_another_font_passes_and_another_page_does_not` makes sure of; a part that is elsewhere, missing, or of
another colour does not. On a phone another font may break a line elsewhere and move all that is below it, so there are
no pictures of phones: what counts there is that nothing leaves the screen and no text lies on another.

`python tests/view/test_pictures.py` takes them anew, when pages look different on purpose. Look at them.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from terrazzo.fsdp import Collective, Operation, Timeline
from terrazzo.layout import Layout, Shard
from terrazzo.view import Page, page_of
from terrazzo.view.data.layout_data import SketchedMesh
from terrazzo.view.data.run_data import runs_data
from terrazzo.view.data.trace_data import trace_data
from view.chromium import chromium, opened

FOLDER = Path(__file__).parent / "pictures"
SIZES = {"desk": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
         "night": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
         "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}}  # fmt: skip
ACROSS = 64  # pixels of a stored picture
CLOSE = 1.5  # the mean distance of pixels, of 255, below which pictures are alike: fonts are 0.2 to 1.1 apart

# ------------------------------------------------------------------ the same pages on every machine


def _checkpoint() -> Page:
    kinds = [
        {"dtype": dtype, "shape": shape, "bytes": size, "parts": parts, "cut": {"steps": steps}}
        for dtype, shape, size, parts, steps in (
            ("bfloat16", [4096, 1024], 8 << 20, 4, [1024, 1024]),
            ("float32", [4096, 1024], 16 << 20, 8, [1024, 512]),
            ("int8", [1024], 1 << 10, 1, [1024]),
        )
    ]
    names = [f"model.layers.{layer}.{name}" for layer in range(12) for name in ("mlp.up", "mlp.down", "norm")]
    names += [f"optimizer.state.{name}.exp_avg" for name in names if "mlp" in name]
    kind = [2 if "norm" in name else 1 if "optimizer" in name else 0 for name in names]
    owners = [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [0]]
    return Page({
        "kind_of_page": "checkpoint", "title": "runs/gpt/step-1000",
        "about": {"values": len(names), "bytes": sum(kinds[each]["bytes"] for each in kind), "ranks": 4, "files": 4},
        "names": names, "kind": kind, "owner": kind, "kinds": kinds, "owners": owners,
        "files": [f"data-{rank}" for rank in range(4)], "by_rank": True,
    })  # fmt: skip


def _difference() -> Page:
    rows = [
        {"name": f"model.layers.{layer}.mlp.up", "dtype": "bfloat16", "shape": [512, 128], "bytes": 131072, "parts": 4,
         "what": "32768 of 65536 elements differ", "differing": 32768, "elements": 65536, "largest": 0.5 / (layer + 1),
         "in": [True, layer != 3]}
        for layer in range(9)
    ]  # fmt: skip
    return Page({"kind_of_page": "diff", "title": "step-1000 and step-1100", "titles": ["step-1000", "step-1100"],
                 "tolerance": 0.0, "values": [60, 59], "equal": 51, "rows": rows})  # fmt: skip


def _timeline(rank: int, slower: float) -> Timeline:
    at, operations = 0.001 * rank, []
    for backward in (False, True):
        for unit in range(4):
            for kind, took in (("gather", 1), ("copy out", 2), ("use", 0), ("free", 1), ("reduce", 1), ("finish", 3)):
                if kind in ("reduce", "finish") and not backward:
                    continue
                begin, at = at, at + took * slower / 1000
                memory = 4 << 20 if kind in ("copy out", "use") else 1 << 20
                operations.append(Operation(kind, unit, begin=begin, end=at, backward=backward, moves=took << 20,
                                            memory=memory, after=memory))  # fmt: skip
                at += 0.006 * slower if kind == "use" else 0
    sums = [Collective("all_reduce", "tp", 4096, 0.02 * n, 0.02 * n + 0.004, n > 2, False) for n in range(5)]
    names = [f"blocks.{unit}" for unit in range(4)]
    return Timeline(rank, 2, 0.0, False, names, [(n,) for n in range(4)], ["dp"] * 4, [""] * 4, 8 << 20, 16 << 20,
                    operations=operations, collectives=sums)  # fmt: skip


def _steps(*slower: float) -> Page:
    timelines = [_timeline(rank, each) for each in slower for rank in range(2)]
    return Page(trace_data(timelines, "steps of two ranks", [f"step {each}" for each in slower for _ in range(2)]))


def _runs() -> Page:
    def run(title: str, far: float) -> dict[str, Any]:
        steps = [{"name": f"step-{at}", "step": at, "saved": 1_700_000_000.0 + 60 * at, "bytes": 4 << 30,
                  "metrics": {"loss": far + 40 / at}, "kept": ["newest"] * (at == 60), "latest": at == 60}
                 for at in (20, 40, 60)]  # fmt: skip
        history = [{"what": "started", "at": 1_700_000_000.0, "seconds": {}, "status": 0, "why": "", "host": "node-1"}]
        losses = [[[at, far + 3 / at] for at in range(1, 50)], [[at, far + 3 / at] for at in range(41, 61)]]
        return {
            "title": title,
            "latest": "step-60",
            "steps": steps,
            "history": history,
            "by_step": True,
            "losses": losses,
        }

    return Page(runs_data([run("runs/wide", 1.0), run("runs/deep", 1.3)]))


def _pick(page: Any) -> None:
    page.get_by_role("searchbox").fill("optimizer layers[3] up")
    page.locator(".row").first.click()
    page.get_by_label("mesh").fill("dp=4,tp=2")
    page.get_by_label("placements").fill("S(0),S(1)")
    page.get_by_role("button", name="draw").click()
    page.evaluate("scrollTo(0, 0)")


PAGES: dict[str, tuple[Callable[[], Page], Callable[[Any], None]]] = {
    "checkpoint": (_checkpoint, lambda page: None),
    "tensor": (_checkpoint, _pick),
    "difference": (_difference, lambda page: page.keyboard.press("End")),
    "layout": (lambda: page_of(Layout.of(SketchedMesh((16, 4), ("dp", "tp")), [Shard(0), Shard(1)], (4000, 512))),
               lambda page: page.locator('[data-rank="9"]').click()),
    "steps": (lambda: _steps(1.0, 1.5), lambda page: None),
    "runs": (_runs, lambda page: None),
}  # fmt: skip

PICTURES = [*((name, "desk") for name in PAGES), ("tensor", "night"), ("steps", "night")]

# ------------------------------------------------------------------ pictures

SMALL = """async ([picture, across]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = across;
  canvas.height = Math.round(across * image.height / image.width);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.filter = "grayscale(1)";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const greys = Array.from({ length: data.length / 4 }, (_, pixel) => data[4 * pixel]);
  return [greys, canvas.toDataURL("image/png").split(",")[1]];
}"""

# Texts that leave the screen or a box that does not scroll; texts of drawings that lie on one another.
WRONG = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  for (const each of document.querySelectorAll("h1, h2, h3, p, dd, dt, td, th, button, input, .legend > *")) {
    const box = each.getBoundingClientRect();
    const scrolls = each.closest(".scroll, .list, .timeline, pre") !== null;
    const outside = box.left < 0 || box.right > innerWidth + 1;
    if (box.width && !scrolls && outside) found.push(`${each.tagName} ${each.textContent} is cut off`);
  }
  for (const picture of document.querySelectorAll("svg")) {
    const inks = [...picture.querySelectorAll("text")]
      .filter((text) => text.ownerSVGElement === picture && text.textContent)
      .map((text) => [text.textContent, text.getBoundingClientRect()]);
    inks.forEach(([text, a], number) => inks.slice(number + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 3 && down > 4) found.push(`"${text}" lies on "${other}"`);
    }));
  }
  return found;
}"""


def small(helper: Any, picture: bytes) -> tuple[list[int], bytes]:
    """A picture in grey, a few pixels wide, made by an empty page: its pixels, and itself."""
    greys, stored = helper.evaluate(SMALL, [base64.b64encode(picture).decode(), ACROSS])
    return greys, base64.b64decode(stored)


def distance(one: list[int], other: list[int]) -> float:
    """How far pixels are from each other, in the mean."""
    assert len(one) == len(other)
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def shot(browser: Any, name: str, size: str, folder: Path, style: str = "") -> tuple[bytes, list[str]]:
    """A page's picture, and what is wrong in it."""
    make, act = PAGES[name]
    make().save(folder / "page.html")
    with opened(browser, folder / "page.html", timezone_id="UTC", locale="en", **SIZES[size]) as page:
        act(page)
        if style:
            page.add_style_tag(content=style)
        page.mouse.move(0, 0)
        page.wait_for_timeout(50)
        return page.screenshot(animations="disabled", caret="hide"), page.evaluate(WRONG)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def helper(browser):
    return browser.new_page()


def test_pages_look_as_they_did(browser, helper, tmp_path):
    for name, size in PICTURES:
        picture, wrong = shot(browser, name, size, tmp_path)
        assert wrong == [], f"{name}, {size}"
        stored, _ = small(helper, (FOLDER / f"{name}-{size}.png").read_bytes())
        far = distance(small(helper, picture)[0], stored)
        if far >= CLOSE:
            (tmp_path / f"{name}-{size}.png").write_bytes(picture)
        assert far < CLOSE, f"{name} looks different: {tmp_path}/{name}-{size}.png beside {FOLDER}/{name}-{size}.png"


def test_on_a_phone_nothing_is_cut_off_or_covered(browser, tmp_path):
    for name in PAGES:
        assert shot(browser, name, "phone", tmp_path)[1] == [], name


def test_another_font_passes_and_another_page_does_not(browser, helper, tmp_path):
    stored, _ = small(helper, (FOLDER / "checkpoint-desk.png").read_bytes())
    for font in ("font-family: 'DejaVu Serif'", "letter-spacing: -0.7px"):
        other, _ = shot(browser, "checkpoint", "desk", tmp_path, f"* {{ {font} !important }}")
        assert distance(small(helper, other)[0], stored) < CLOSE
    broken, _ = shot(browser, "checkpoint", "desk", tmp_path, "h1 { display: none }")
    assert distance(small(helper, broken)[0], stored) > CLOSE
    _, wrong = shot(browser, "checkpoint", "phone", tmp_path, "h1 { width: 600px }")
    assert any("is cut off" in each for each in wrong)


def take() -> None:
    """Take all pictures anew."""
    import tempfile

    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        helper = browser.new_page()
        for name, size in PICTURES:
            picture, wrong = shot(browser, name, size, Path(folder))
            print(name, size, *wrong)
            (FOLDER / f"{name}-{size}.png").write_bytes(small(helper, picture)[1])


if __name__ == "__main__":
    take()
