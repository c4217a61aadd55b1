"""Takes the pictures of docs/view.md from the viewer's own pages: `python docs/pictures/view.py`.

Needs Debian's chromium, and the extra `test`.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from playwright.sync_api import sync_playwright
from torch import nn

from terrazzo.checkpoint import Checkpoint, CheckpointManager, save
from terrazzo.checkpoint.manager import Keep
from terrazzo.fsdp import fully_shard, trace
from terrazzo.launch.history import Happened, History
from terrazzo.layout import Layout, Replicate, Shard
from terrazzo.tensor import distribute_tensor, init_device_mesh
from terrazzo.testing import close_all, run_ranks
from terrazzo.view import Page, Viewer, page_of
from terrazzo.view.data.diff_data import diff_data
from terrazzo.view.data.layout_data import SketchedMesh, layout_data
from terrazzo.view.data.run_data import run_data, runs_data
from terrazzo.view.data.trace_data import read_timeline

FOLDER = Path(__file__).parent


def save_model(path: str, by: float) -> None:
    """On four ranks: a small transformer, after `by` more training."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    state: dict[str, Any] = {"step": int(100 * by)}
    for layer in range(4):
        for name, shape, placements in (
            ("attention.qkv", (96, 32), [Shard(1), Shard(0)]),
            ("attention.out", (32, 32), [Shard(0), Shard(1)]),
            ("mlp.up", (128, 32), [Shard(1), Shard(0)]),
            ("mlp.down", (32, 128), [Shard(0), Shard(1)]),
            ("norm", (33,), [Shard(0), Replicate()]),
        ):
            values = torch.randn(shape) / 8
            change = by * (layer + 1) / 16 * torch.randn(shape) * (name != "norm")
            state[f"model.layers.{layer}.{name}"] = distribute_tensor(values + change, mesh, placements)
    save(state, checkpoint_id=path)


def save_step(folder: str) -> None:
    """On two ranks: the trace of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)])
    for block in model:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    x = torch.randn(64, 512)
    for _ in range(2):
        with trace(model) as steps:
            model(x).square().mean().backward()
        model.zero_grad()
    steps.save(f"{folder}/rank-{dist.get_rank()}.json")


def make_run(folder: Path) -> Page:
    """A run that went on after a fault; its losses are made up."""
    with CheckpointManager(folder, keep=Keep(last=2, steps=40), best="loss") as manager:
        for step in range(20, 121, 20):
            manager.save(step, {"w": torch.ones(1000)}, {"loss": loss_at(step)})
        manager.wait()
        at = manager.records()[-1].saved
    history = History(folder)
    history.add(Happened("started", at - 2))
    history.add(Happened("went on", at - 1, {"detect": 0.2, "start": 5.1, "plan": 0.1, "read": 0.8, "first_step": 0.6}))
    history.add(Happened("ended", at + 0.2))
    with open(folder / "loss.csv", "w", newline="") as file:
        rows = csv.writer(file)
        for first, last in ((1, 76), (61, 121)):
            rows.writerow(["step", "train_loss"])
            rows.writerows([8 * step, loss_at(step)] for step in range(first, last))
    return Page(runs_data([run_data(folder, losses=folder / "loss.csv", samples_per_step=8, title="runs/gpt")]))


def loss_at(step: int) -> float:
    """What it is after a step."""
    noise = torch.randn((), generator=torch.Generator().manual_seed(step)).item()
    return 1.2 + 2.5 * 0.97**step + 0.03 * noise


def main() -> None:
    """Take all pictures."""
    work = Path(tempfile.mkdtemp(prefix="view-"))
    one, two = str(work / "step-100"), str(work / "step-150")
    run_ranks(4, save_model, one, 1.0)
    run_ranks(4, save_model, two, 1.5)
    run_ranks(2, save_step, str(work))
    timelines = [read_timeline(work / f"rank-{rank}.json") for rank in range(2)]
    layout = Layout.of(SketchedMesh((64, 8), ("dp", "tp")), [Shard(0), Shard(1)], (4096, 4096))
    layout_page = Page(layout_data(layout, itemsize=2, title="bfloat16 [4096, 4096] on dp=64,tp=8: S(0), S(1)"))
    checkpoint = Checkpoint(one)

    def pick_tensor(page: Any) -> None:
        page.locator(".row", has_text="qkv").first.click()
        page.get_by_role("button", name="Statistics").click()
        page.locator(".chart .bars rect").first.wait_for(state="attached")
        page.locator(".cell").nth(2).click()

    def pick_rank(page: Any) -> None:
        page.locator('[data-rank="77"]').click()

    def pick_difference(page: Any) -> None:
        page.get_by_label("order").select_option("by largest difference")
        page.locator(".row").first.click()

    with sync_playwright() as driver, Viewer(page_of(checkpoint, title="step-100"), [checkpoint]) as viewer:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))

        def shoot(name: str, what: Page | str, size: tuple[int, int], act: Callable[[Any], None] | None = None) -> None:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
            if isinstance(what, Page):
                what.save(work / "page.html")
            page.goto((work / "page.html").as_uri() if isinstance(what, Page) else what)
            page.wait_for_selector("html[data-ready=yes]")
            if act is not None:
                act(page)
            page.wait_for_timeout(500)
            page.screenshot(path=FOLDER / f"view-{name}.png")
            page.close()

        shoot("checkpoint", viewer.url, (1100, 640), pick_tensor)
        shoot("layout", layout_page, (900, 620), pick_rank)
        both = diff_data(Checkpoint(one), Checkpoint(two), ("step-100", "step-150"))
        shoot("diff", Page(both), (1000, 480), pick_difference)
        shoot("step", page_of(*timelines, title="a step of two ranks"), (1000, 900))
        shoot("run", make_run(work / "run"), (1000, 720))
        browser.close()
    close_all()
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
