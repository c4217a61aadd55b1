"""Pages in a real browser: they open without an error, fetch nothing, and clicks do what they say."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, save
from terrazzo.layout import Layout, Replicate, Shard
from terrazzo.view import Page, Viewer, page_of
from terrazzo.view.data.checkpoint_data import checkpoint_data
from terrazzo.view.data.diff_data import diff_data
from terrazzo.view.data.layout_data import SketchedMesh, layout_data
from terrazzo.view.page import SCRIPTS
from view.chromium import chromium, opened, texts
from view.samples import HOSTILE, SHARDED, save_hostile, save_sharded


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sharded") / "one")
    run_ranks(4, save_sharded, path)
    return path


def saved(page: Page, folder: Path) -> Path:
    page.save(folder / "page.html")
    return folder / "page.html"


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoints_tree_and_its_parts(browser, sharded, tmp_path):
    with opened(browser, saved(page_of(Checkpoint(sharded), title="four ranks"), tmp_path)) as page:
        assert page.title() == "four ranks - terrazzo" and texts(page, "h1") == ["four ranks"]
        names = texts(page, ".row .name")
        assert {"model", "square", "cube", "step"} <= set(names), "a small tree is open"
        page.locator(".row", has_text="model").first.click()
        assert "square" not in texts(page, ".row .name"), "a click closes it"
        page.locator(".row", has_text="model").first.click()
        page.locator(".row", has_text="square").click()
        assert texts(page, ".details h2") == ["model.square"]
        assert "float32" in page.locator(".details .facts").first.text_content()
        cells = page.locator(".details svg.grid .cell")
        assert cells.count() == 4
        assert [title.split(": ") for title in texts(page, ".details svg.grid .cell title")] == [
            ["[0:3, 0:2]", "0"], ["[0:3, 2:4]", "1"], ["[3:6, 0:2]", "2"], ["[3:6, 2:4]", "3"],
        ]  # fmt: skip
        cells.nth(3).click()
        assert texts(page, ".details .said")[0].startswith("[3:6, 2:4], saved by rank 3, in data-")
        page.locator(".row", has_text="step").click()
        assert "terrazzo show" in page.locator(".details").text_content()


def test_searching(browser, sharded, tmp_path):
    with opened(browser, saved(page_of(Checkpoint(sharded)), tmp_path)) as page:
        page.get_by_role("searchbox").fill("model 5x3")
        assert texts(page, ".row .name") == ["model.uneven"] and texts(page, ".found") == ["1 of 7 values, 60 bytes"]
        page.get_by_role("searchbox").fill("nothing like it")
        assert texts(page, ".row .name") == [] and texts(page, ".found") == ["0 of 7 values, 0 bytes"]
        page.get_by_role("searchbox").fill("")
        assert "model" in texts(page, ".row .name")


NAMED = {
    "model.layers.0.weight": ("bfloat16", [4096, 128]),
    "model.layers.1.weight": ("float32", [128, 4096]),
    "model.layers.10.weight": ("float32", [14096, 12]),
    "model.layers.10.bias": ("int8", [4096]),
    "optimizer.state.model.layers.0.weight.exp_avg": ("float32", [4096, 128]),
    "step": (None, None),
}
SEARCHES = {
    "model.layers.0.weight": [0, 4],
    "layers/0": [0, 4],
    "/model/layers/0/": [0, 4],
    "layers[0]": [0, 4],
    'model["layers"][0].weight': [0, 4],
    "model['layers'][10]['bias']": [3],
    "layers.1": [1],
    "layers.1.": [1],
    "LAYERS weight 1": [1],
    "layers.*.weight": [0, 1, 2, 4],
    "model.*.bias": [3],
    "*.exp_avg": [4],
    "layers.*": [0, 1, 2, 3, 4],
    "module._orig_mod.model.layers.10.bias": [3],
    "bf16": [0],
    "dtype:fp32 name:layers.0": [4],
    "dtype:float": [0, 1, 2, 4],
    "shape:4096": [0, 1, 3, 4],
    "4096x128": [0, 4],
    "[4096, 128] bf16": [0],
    "(4096,128)": [0, 4],
    "shape:*x4096": [1],
    "object": [5],
    "shape:x": [],
    "+(": [],
}


def test_a_search_in_any_notation(browser, tmp_path):
    kinds = [
        {"dtype": dtype, "shape": shape, "bytes": 8, "parts": 1, "cut": shape and {"steps": shape}}
        for dtype, shape in NAMED.values()
    ]
    data = {
        "kind_of_page": "checkpoint", "title": "names", "about": {"values": len(NAMED), "bytes": 8},
        "names": list(NAMED), "kind": list(range(len(NAMED))), "owner": [-1] * len(NAMED), "kinds": kinds,
        "owners": [], "files": [], "by_rank": False,
    }  # fmt: skip
    with opened(browser, saved(Page(data), tmp_path)) as page:
        for words, expected in SEARCHES.items():
            page.get_by_role("searchbox").fill(words)
            assert texts(page, ".row .name") == [list(NAMED)[number] for number in expected], words


def test_it_opens_with_what_takes_the_room(browser, tmp_path):
    state = {
        "model.a.w": torch.zeros(30, 10),
        "model.b.w": torch.zeros(10, 10).bfloat16(),
        "model.b.q": torch.zeros(50).char(),
        "step": 3,
    }
    save(state, checkpoint_id=tmp_path / "one")
    with opened(browser, saved(page_of(Checkpoint(tmp_path / "one")), tmp_path)) as page:
        assert texts(page, ".overview h2") == ["All values"]
        assert texts(page, ".overview .facts") == ["values4elements450size1.4 kB"]
        legend = [" ".join(text.split()) for text in texts(page, ".overview .legend > span")]
        assert legend == [
            "float32 1.2 kB, 83% 1 tensor",
            "bfloat16 200 bytes, 14% 1 tensor",
            "int8 50 bytes, 3% 1 tensor",
        ]
        modules = page.locator(".modules button")
        assert texts(page, ".modules .name") == ["model", "step"]
        modules.first.click()
        assert texts(page, ".overview h2") == ["model"] and texts(page, ".modules .name") == ["a", "b"]
        modules.nth(1).click()
        assert texts(page, ".overview h2") == ["model.b"] and texts(page, ".row.picked .name") == ["b"]
        assert texts(page, ".modules .size") == ["200 bytes, 80%", "50 bytes, 20%"]
        page.locator(".overview button", has_text="bfloat16").click()
        assert texts(page, ".details h2") == ["model.b.w"]


def test_keys(browser, sharded, tmp_path):
    with opened(browser, saved(page_of(Checkpoint(sharded)), tmp_path)) as page:
        rows = texts(page, ".row .name")
        page.keyboard.press("j")
        assert texts(page, ".row.picked .name") == rows[:1] and texts(page, ".details h2") == ["model"]
        page.keyboard.press("ArrowDown")
        assert texts(page, ".row.picked .name") == rows[1:2] and texts(page, ".details h2") == [f"model.{rows[1]}"]
        page.keyboard.press("h")
        assert texts(page, ".row.picked .name") == ["model"], "to the module above"
        page.keyboard.press("h")
        assert len(texts(page, ".row .name")) < len(rows), "which it closes"
        page.keyboard.press("l")
        page.keyboard.press("End")
        assert texts(page, ".row.picked .name") == rows[-1:]
        page.keyboard.press("/")
        page.keyboard.type("cube j?")
        assert page.get_by_role("searchbox").input_value() == "cube j?", "letters are typed there"
        page.get_by_role("searchbox").fill("cube")
        page.keyboard.press("Enter")
        assert texts(page, ".details h2") == ["model.cube"]
        page.keyboard.press("/")
        page.keyboard.press("Escape")
        assert texts(page, ".row .name") == rows
        page.keyboard.press("?")
        keys = texts(page, "dialog tbody tr")
        assert page.locator("dialog").is_visible() and len(keys) == 8 and any("search" in each for each in keys)
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()


def test_a_phone_goes_to_what_was_picked_and_back(browser, sharded, tmp_path):
    size = {"width": 390, "height": 600}
    with opened(browser, saved(page_of(Checkpoint(sharded)), tmp_path), viewport=size, has_touch=True) as page:
        row = page.locator(".row", has_text="square")
        assert row.bounding_box()["height"] >= 36, "a finger hits it"
        row.tap()
        assert -1 < page.locator(".details h2").bounding_box()["y"] < 100
        page.get_by_role("button", name="names").tap()
        assert -1 < page.get_by_role("searchbox").bounding_box()["y"] < 100


def test_cuts_are_drawn_along_their_own_axis(browser, tmp_path):
    """Rows that are sharded are below one another; the axes and the mesh dims that cut them have their names."""
    mesh = SketchedMesh((3, 2), ("dp", "tp"))
    cases = {
        (Shard(0), Replicate()): ((7, 5), "down", ["dim 1: 5 →", "← dim 0: 7 over dp"]),
        (Replicate(), Shard(1)): ((7, 5), "across", ["dim 1: 5 over tp →", "← dim 0: 7"]),
        (Shard(1), Replicate()): ((2, 7, 5), "down", ["dim 2: 5 →", "← dim 0: 2 × dim 1: 7 over dp"]),
    }
    for placements, (shape, way, axes) in cases.items():
        with opened(browser, saved(page_of(Layout.of(mesh, list(placements), shape)), tmp_path)) as page:
            boxes = [page.locator(".cell rect").nth(n).bounding_box() for n in range(page.locator(".cell").count())]
            assert len(boxes) > 1
            assert len({box["x"] for box in boxes}) == (1 if way == "down" else len(boxes))
            assert len({box["y"] for box in boxes}) == (len(boxes) if way == "down" else 1)
            sides = [box["height" if way == "down" else "width"] for box in boxes]
            assert sides[-1] < sides[0], "the last part is smaller, as it is"
            assert texts(page, "svg.grid .axis") == axes and texts(page, "svg.mesh .axis")[0] == "tp →"
    with opened(browser, saved(page_of(Layout.of(mesh, [Shard(0), Shard(0)], (9,))), tmp_path)) as page:
        assert texts(page, "svg.grid .axis") == ["dim 0: 9 over dp, tp →"], "a vector lies"


def test_who_would_hold_what_on_a_mesh(browser, sharded, tmp_path):
    with opened(browser, saved(page_of(Checkpoint(sharded)), tmp_path)) as page:
        page.locator(".row", has_text="cube").click()
        page.get_by_label("mesh").fill("dp=2,tp=3")
        page.get_by_label("placements").fill("S(0),S(1)")
        page.get_by_role("button", name="draw").click()
        sketch = page.locator(".sketch")
        assert sketch.locator("svg.mesh .rank").count() == 6 and sketch.locator("svg.grid .cell").count() == 6
        sketch.locator(".rank").nth(5).click()
        assert texts(page, ".sketch .said") == ["rank 5 (dp 1, tp 2) holds [2:4, 2:3, 0:5]: 10 elements, 40 bytes"]
        sketch.locator(".cell").nth(0).click()
        assert texts(page, ".sketch .said") == ["[0:2, 0:1, 0:5]: 10 elements, 40 bytes, on rank 0"]
        page.get_by_label("mesh").fill("dp=2,tp=2")
        for name, (_, placements) in SHARDED.items():  # without placements, those as which it was saved
            page.locator(".row", has_text=name.removeprefix("model.")).click()
            page.get_by_label("placements").fill("")
            page.get_by_role("button", name="draw").click()
            words = ", ".join(f"{m}: {placement}" for m, placement in zip(("dp", "tp"), placements, strict=True))
            found = page.locator(".sketch .facts dd").first.text_content().split(" or ")
            assert words in found and len(found) <= 2, "which two fit, where no rank tells them apart"
        page.get_by_label("mesh").fill("dp=3")
        page.get_by_role("button", name="draw").click()
        assert texts(page, ".sketch .error")[0].startswith("No placements on this mesh")
        page.locator(".row", has_text="cube").click()
        page.get_by_label("mesh").fill("dp=2,tp=3")
        page.get_by_label("placements").fill("S(7),R")
        page.get_by_role("button", name="draw").click()
        assert texts(page, ".sketch .error") == ["S(7): this tensor has 3 dims"]


def test_the_pages_rule_of_layouts_is_the_librarys(browser, tmp_path):
    """The page computes layouts by itself; whatever it is asked, it finds what `Layout` does."""
    chance = random.Random(5)
    cases = []
    for _ in range(300):
        shape = [chance.randint(0, 9) for _ in range(chance.randint(0, 3))]
        mesh = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        kinds = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        cases.append((shape, mesh, [chance.choice(kinds) for _ in mesh]))
    expected = []
    for shape, mesh, words in cases:
        placements = [Shard(int(word[2])) if word != "R" else Replicate() for word in words]
        expected.append(layout_data(Layout.of(SketchedMesh(tuple(mesh)), placements, tuple(shape)))["grid"])
    script = "".join(
        re.sub(r"^export ", "", (Path(__file__).parents[2] / f"src/terrazzo/view/page/{name}").read_text(), flags=re.M)
        for name in ("grid.js",)
    )
    page = browser.new_page()
    found = page.evaluate(
        "(cases) => {"
        + script
        + """
        return cases.map(([shape, mesh, words]) => {
          const dims = parseMesh(mesh.map((size, m) => `d${m}=${size}`).join(","));
          return gridOf(shape, boxesOfMesh(shape, dims, parsePlacements(words.join(","), mesh.length, shape.length)));
        });
        }""",
        cases,
    )
    page.close()
    assert found == json.loads(json.dumps(expected))


def test_hostile_names_stay_text(browser, tmp_path):
    save_hostile(tmp_path / "hostile")
    page_file = saved(page_of(Checkpoint(tmp_path / "hostile"), title="<script>window.broken = 1</script>"), tmp_path)
    assert page_file.read_text().count("<script") == 2, "the data and the page's own"
    with opened(browser, page_file) as page:
        for name in HOSTILE:
            page.get_by_role("searchbox").fill(name.split("\n")[0].strip())
            page.locator(".row").first.click()
            assert page.locator(".details h2").text_content() == name
        assert page.locator(".tree script, .tree img, .details img, .details script").count() == 0


def test_a_hundred_thousand_tensors(browser, tmp_path):
    names = [f"model.layers.{i // 100}.experts.{i % 100}.weight" for i in range(100_000)]
    kind = {"dtype": "bfloat16", "shape": [64, 64], "bytes": 8192, "parts": 1, "cut": {"steps": [64, 64]}}
    data = {
        "kind_of_page": "checkpoint", "title": "many", "about": {"values": 100_000, "bytes": 8192 * 100_000},
        "names": names, "kind": [0] * 100_000, "owner": [0] * 100_000, "kinds": [kind], "owners": [[0]],
        "files": ["data-0"], "by_rank": True,
    }  # fmt: skip
    with opened(browser, saved(Page(data), tmp_path)) as page:
        assert page.locator(".row").count() < 200
        page.get_by_role("searchbox").fill("layers.777 experts.42.")
        assert texts(page, ".row .name") == ["model.layers.777.experts.42.weight"]
        page.get_by_role("searchbox").fill("weight")
        assert texts(page, ".found") == ["100,000 of 100,000 values, 819.2 MB"] and page.locator(".row").count() < 200
        page.locator(".list").evaluate("box => { box.scrollTop = box.scrollHeight; }")
        page.locator(".row", has_text="layers.999.experts.99.").wait_for()
        assert page.locator(".row").count() < 200
        page.locator(".row", has_text="layers.999.experts.99.").click()
        assert texts(page, ".details h2") == ["model.layers.999.experts.99.weight"]


def test_a_list_that_is_taller_than_a_browser_scrolls(browser, tmp_path):
    count = 700_000
    data = checkpoint_data(_small(tmp_path), "tall")
    data |= {"names": [f"n{i}" for i in range(count)], "kind": [0] * count, "owner": [0] * count}
    with opened(browser, saved(Page(data), tmp_path)) as page:
        page.locator(".list").evaluate("box => { box.scrollTop = box.scrollHeight; }")
        page.locator(".row", has_text=f"n{count - 1}").wait_for()
        page.locator(".list").evaluate("box => { box.scrollTop = 0; }")
        page.locator(".row").get_by_text("n0", exact=True).wait_for()


def _small(folder: Path) -> Checkpoint:
    save({"w": torch.ones(2)}, checkpoint_id=folder / "small")
    return Checkpoint(folder / "small")


# ------------------------------------------------------------------ differences, layouts


def test_differences(browser, sharded, tmp_path):
    other = str(tmp_path / "other")
    run_ranks(4, save_sharded, other, 0.5)
    page_file = saved(Page(diff_data(Checkpoint(sharded), Checkpoint(other), ("before", "after"))), tmp_path)
    with opened(browser, page_file) as page:
        page.locator(".row", has_text="uneven").click()
        assert texts(page, ".details .said")[0].startswith("15 of 15 elements differ, by up to 0.5")
        page.get_by_label("order").select_option("by largest difference")
        assert texts(page, ".row .name") == ["model.uneven", "step"]


def test_what_is_equal_and_what_is_nan_in_one(browser, tmp_path):
    for name, value in (("a", 1.0), ("b", float("nan"))):
        save({"w": torch.tensor([value, 2.0])}, checkpoint_id=tmp_path / name)
    one, other = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")
    with opened(browser, saved(Page(diff_data(one, one, ("a", "a"))), tmp_path)) as page:
        assert texts(page, ".note") == ["no difference"] and page.locator(".tree").count() == 0
    with opened(browser, saved(Page(diff_data(one, other, ("a", "b"))), tmp_path)) as page:
        assert "50.0%, nan in one" in page.locator(".row").text_content()


def test_a_layout_of_512_ranks(browser, tmp_path):
    layout = Layout.of(SketchedMesh((64, 8), ("dp", "tp")), [Shard(0), Shard(1)], (4096, 4096))
    with opened(browser, saved(page_of(layout), tmp_path)) as page:
        assert page.locator("svg.mesh .rank").count() == 512 and page.locator("svg.grid .cell").count() == 512
        page.locator('[data-rank="511"]').click()
        assert texts(page, ".held .said") == ["rank 511 (dp 63, tp 7) holds [4032:4096, 3584:4096]: 32,768 elements"]
        assert page.locator(".picked").count() == 2, "the rank and its part"
        page.keyboard.press("n")
        page.keyboard.press("n")
        assert texts(page, ".held .said")[0].startswith("rank 1 (dp 0, tp 1) holds")


def test_ranks_that_hold_nothing_say_so(browser, tmp_path):
    layout = Layout.of(SketchedMesh((3, 2), ("dp", "tp")), [Shard(0), Shard(0)], (7,))
    with opened(browser, saved(page_of(layout), tmp_path), color_scheme="dark") as page:
        page.locator('[data-rank="5"]').click()
        assert texts(page, ".held .said") == ["rank 5 (dp 2, tp 1) holds nothing"]
        colors = "element => [getComputedStyle(element).fill, getComputedStyle(document.body).backgroundColor]"
        ink, paper = page.locator('[data-rank="5"] text').evaluate(colors)
        assert (ink, paper) == ("rgb(230, 232, 235)", "rgb(18, 20, 23)"), "its number can be read"


# ------------------------------------------------------------------ served


def test_statistics_and_values_on_demand(browser, sharded, tmp_path):
    checkpoint = Checkpoint(sharded)
    with Viewer(page_of(checkpoint), [checkpoint]) as viewer, opened(browser, viewer.url) as page:
        page.locator(".row", has_text="whole").click()
        page.get_by_role("button", name="Statistics").click()
        page.locator(".asked .facts").wait_for()
        values = checkpoint["model.whole"][...]
        shown = page.locator(".asked .facts").text_content()
        assert f"{float(values.max()):.6g}" in shown and "elements6" in shown.replace(" ", "")
        page.locator(".chart .bars rect").first.wait_for(state="attached")
        page.locator(".row", has_text="step").click()
        page.get_by_role("button", name="Show the value").click()
        page.locator("pre").wait_for()
        assert texts(page, "pre") == ["7"]


def test_a_hostile_value_stays_text(browser, tmp_path):
    save_hostile(tmp_path / "hostile")
    checkpoint = Checkpoint(tmp_path / "hostile")
    with Viewer(page_of(checkpoint), [checkpoint]) as viewer, opened(browser, viewer.url) as page:
        page.get_by_role("searchbox").fill("text object")
        page.locator(".row").first.click()
        page.get_by_role("button", name="Show the value").click()
        page.locator("pre").wait_for()
        assert texts(page, "pre") == ["</pre><script>window.broken = 1</script>"]


def test_values_of_both_checkpoints(browser, sharded, tmp_path):
    other = str(tmp_path / "other")
    run_ranks(4, save_sharded, other, 2.0)
    both = [Checkpoint(sharded), Checkpoint(other)]
    with Viewer(Page(diff_data(*both, ("before", "after"))), both) as viewer, opened(browser, viewer.url) as page:
        page.locator(".row", has_text="step").click()
        page.get_by_role("button", name="Value in before").click()
        page.get_by_role("button", name="Value in after").click()
        page.locator("pre").nth(1).wait_for()
        assert texts(page, "pre") == ["7", "11"]


def test_every_script_is_in_the_page():
    folder = Path(__file__).parents[2] / "src" / "terrazzo" / "view" / "page"
    whole = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", re.MULTILINE)
    names = Counter(name for path in folder.glob("*.js") for name in whole.findall(path.read_text()))
    assert [name for name, times in names.items() if times > 1] == [], "in the page all scripts are one"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    for number, name in enumerate(SCRIPTS):
        used = re.findall(r'from "\./([a-z]+\.js)"', (folder / name).read_text())
        assert set(used) <= set(SCRIPTS[:number]), f"{name} uses what comes after it"
