"""`terrazzo view`: a checkpoint, two of them, a layout, steps or runs as one page."""

from __future__ import annotations

import json
import webbrowser
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from terrazzo._meant import meant
from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.manager.records import steps_at
from terrazzo.checkpoint.stores.places import is_url
from terrazzo.cli.screen import ERR, Json, errors, paused_collector, print_json, progress, said_on_stderr, say
from terrazzo.errors import ViewError
from terrazzo.fsdp.perfetto import perfetto as perfetto_of
from terrazzo.launch.config import is_run_file, read_run
from terrazzo.layout import Layout, Replicate
from terrazzo.view.data.checkpoint_data import checkpoint_data
from terrazzo.view.data.diff_data import diff_data
from terrazzo.view.data.layout_data import layout_data, mesh_of, placements_of, shape_of
from terrazzo.view.data.run_data import data_of_run, run_data, runs_data
from terrazzo.view.data.trace_data import read_timeline, trace_data
from terrazzo.view.page import Page
from terrazzo.view.server import Viewer

_Objects = tuple[Page, list[Checkpoint]]


def view(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A checkpoint, or two to compare; traces of ranks, of one step or several; folders or files of runs.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it on this machine, with statistics on demand.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="To serve on; 0: one that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    tolerance: Annotated[float, typer.Option(help="Of two checkpoints, numbers this close are equal.")] = 0.0,
    losses: Annotated[Path | None, typer.Option(help="Of a run, the CSV file of its monitor.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write traces as JSON for Perfetto.")] = None,
    mesh: Annotated[str | None, typer.Option(help="A layout instead: the mesh, as dp=64,tp=8.")] = None,
    shape: Annotated[str | None, typer.Option(help="Of its tensor, as 4096,4096.")] = None,
    placements: Annotated[str, typer.Option(help='Of its tensor, as "S(0),S(1)".')] = "",
    dtype: Annotated[str, typer.Option(help="Of its tensor.")] = "float32",
    as_json: Json = False,
) -> None:
    """Show a checkpoint, what differs between two, who holds what, steps, or runs, as one page of HTML.

    The page needs no network. Without --out and --serve it is written to terrazzo-view.html.
    """
    with errors():
        with said_on_stderr(as_json):
            page, checkpoints = _page(what or [], mesh, shape, placements, dtype, tolerance, losses, perfetto)
            target = Path("terrazzo-view.html") if out is None and not serve else out
            if target is not None:
                page.save(target)
                say(f"{page.title}: {target}")
            viewer = Viewer(page, checkpoints, port) if serve else None
            if viewer is not None:
                say(f"{page.title}: {viewer.url} (until Ctrl-C)")
        if as_json:
            places = {"page": target and str(target), "address": viewer and viewer.url}
            print_json({"title": page.title, "kind": page.data["kind_of_page"], **places})
        if browser and viewer is not None:
            webbrowser.open(viewer.url)
        elif browser and target is not None:
            webbrowser.open(target.absolute().as_uri())
        if viewer is not None:
            _serve(viewer)


def _serve(viewer: Viewer) -> None:
    try:
        viewer.serve_forever()
    except KeyboardInterrupt as interrupt:
        say("ended", on=ERR)
        raise typer.Exit(130) from interrupt
    finally:
        viewer.close()


def _page(
    what: list[str],
    mesh: str | None,
    shape: str | None,
    placements: str,
    dtype: str,
    tolerance: float,
    losses: Path | None,
    perfetto: Path | None,
) -> _Objects:
    """The page of what is asked for, and the checkpoints whose values it can ask for."""
    if mesh is not None:
        if what:
            raise ViewError("--mesh shows a layout of its own: give no checkpoint beside it")
        if shape is None:
            raise ViewError("--mesh needs the shape of a tensor: add --shape, as in --shape 4096,4096")
        return Page(_layout(mesh, shape, placements, dtype)), []
    if shape is not None or placements:
        raise ViewError("--shape and --placements are of a layout: add its --mesh, as in --mesh dp=64,tp=8")
    if not what:
        raise ViewError("name a checkpoint, a trace or a run; or a layout, by --mesh, --shape and --placements")
    if all(map(_is_trace, what)):
        return Page(_traces(what, perfetto)), []
    if perfetto is not None:
        raise ViewError("--perfetto writes traces, and these are none")
    if all(map(_is_run, what)):
        if losses is not None and len(what) > 1:
            raise ViewError("--losses is of one run: of several, name their .toml files, which know it")
        return Page(runs_data([_run(path, losses) for path in what])), []
    if len(what) > 2:
        raise ViewError(f"{len(what)} checkpoints cannot be compared at once: name one or two")
    if len(what) == 2:
        return _difference(what[0], what[1], tolerance)
    with paused_collector(), progress("reading names"):
        opened = Checkpoint(what[0])
        return Page(checkpoint_data(opened, what[0])), [opened]


def _layout(mesh: str, shape: str, placements: str, dtype: str) -> dict[str, Any]:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        close = meant(dtype, [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)])
        raise ViewError(f"{dtype!r} is no dtype of torch: write bfloat16, float32, ...{close}")
    sketched, size = mesh_of(mesh), shape_of(shape)
    placed = placements_of(placements) if placements else (Replicate(),) * len(sketched.shape)
    layout = Layout.of(sketched, placed, size)
    words = ", ".join(map(str, placed))
    return layout_data(layout, itemsize=kind.itemsize, title=f"{dtype} {list(size)} on {mesh}: {words}")


def _is_trace(path: str) -> bool:
    if is_url(path) or not path.endswith(".json") or not Path(path).is_file():
        return False
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "traceEvents" in document


def _traces(paths: list[str], target: Path | None) -> dict[str, Any]:
    if len(set(paths)) < len(paths):
        raise ViewError("a trace is named twice")
    timelines = [read_timeline(path) for path in paths]
    steps = _steps_of(paths, [each.rank for each in timelines])
    if target is not None:
        if len(set(steps)) > 1:
            raise ViewError(f"--perfetto writes one step, and these are {len(set(steps))}")
        target.write_bytes(perfetto_of(timelines))
        say(f"for https://ui.perfetto.dev: {target}")
    title = Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} ranks"
    return trace_data(timelines, title if len(set(steps)) == 1 else " and ".join(dict.fromkeys(steps)), steps)


def _steps_of(paths: list[str], ranks: list[int]) -> list[str]:
    """The step of each file, by name: files of a folder are one step, unless a rank comes again.

    >>> _steps_of(["old/0.json", "old/1.json", "new/0.json"], [0, 1, 0])
    ['old', 'old', 'new']
    >>> _steps_of(["a.json", "b.json"], [0, 0])
    ['a.json', 'b.json']
    """
    if len(set(ranks)) == len(ranks):
        return [""] * len(ranks)
    places = [(str(Path(path).parent), rank) for path, rank in zip(paths, ranks, strict=True)]
    repeated = {folder for (folder, _), times in Counter(places).items() if times > 1}
    seen, names, steps = Counter[tuple[str, int]](), dict[tuple[str, int], str](), []
    for path, (folder, rank) in zip(paths, places, strict=True):
        seen[folder, rank] += 1
        steps.append(names.setdefault((folder, seen[folder, rank]), path if folder in repeated else folder))
    return steps


def _difference(one: str, other: str, tolerance: float) -> _Objects:
    with paused_collector():
        both = [Checkpoint(one), Checkpoint(other)]
        with progress("comparing") as bar:
            bar.of(both[0].total_bytes())
            data = diff_data(both[0], both[1], (one, other), tolerance=tolerance, progress=bar.advance)
    return Page(data), both


def _is_run(path: str) -> bool:
    return is_run_file(path) or bool(steps_at(path))


def _run(path: str, losses: Path | None) -> dict[str, Any]:
    return data_of_run(read_run(path), losses) if is_run_file(path) else run_data(path, losses=losses)
