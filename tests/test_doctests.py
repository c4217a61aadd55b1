"""The code in docstrings and on the pages of the documentation does what they show, in a world of one rank."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from page_code import FLAGS, ROOT, blocks_of, complaints_about, run_page
from ranks import run_ranks
from warm_python import warm_python

SOURCES = ROOT / "src"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def modules_with_examples() -> list[str]:
    files = (SOURCES / "terrazzo").rglob("*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files if ">>> " in file.read_text())


def pages_with_code() -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES if any(b.note != "not run" for b in blocks_of(page))]


def run_docstrings(file: str, folder: str) -> None:
    os.chdir(folder)
    parts = (ROOT / file).relative_to(SOURCES).with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test)
    results = runner.summarize(verbose=False)
    assert results.attempted > 0, "an example that is not found is not tested"
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples failed: see the output"


@pytest.mark.parametrize("file", modules_with_examples())
def test_examples_in_docstrings(file, tmp_path):
    run_ranks(1, run_docstrings, file, str(tmp_path))


@pytest.mark.parametrize("file", pages_with_code())
def test_code_on_pages(file, tmp_path):
    run_ranks(1, run_page, file, str(tmp_path), warm_python(), timeout=900)


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    ["train", "mixed-precision", "gradient-accumulation", "tensor-parallelism", "save", "hugging-face", "operation"],
)
def test_the_programs_of_tasks_run_as_they_are(page, tmp_path):
    """As docs/how-to/index.md says: by python, and by torchrun on several ranks, without a process group before."""
    if page == "hugging-face":
        pytest.importorskip("transformers")
    blocks = [block.text for block in blocks_of(ROOT / "docs" / "how-to" / f"{page}.md") if block.language == "python"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHON_EXEC"] = warm_python()
    for ranks, start in enumerate(([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]), 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "program.py").write_text("\n".join(blocks))
        command = [warm_python(), *start, "program.py"]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr


def test_every_block_on_every_page_is_run_or_says_why_not():
    assert [complaint for page in PAGES for complaint in complaints_about(blocks_of(page))] == []


WITHOUT_EXAMPLE = {
    *("asked_for", "check_size", "emit", "gather_into", "scatter_cut"),  # for other modules of the package
    *("load_state_dict", "save_state_dict"),  # deprecated
    "fsdp_on_cpu",  # for tests of Accelerate; docs/install.md shows it
    "resume",  # with Ray; docs/clusters.md shows it
    "init",  # of the device `late`: other functions call it
}


def test_every_public_function_has_an_example_that_runs():
    """A call in its docstring, or on a page."""
    surface = (Path(__file__).parent / "public_surface.txt").read_text()
    functions = set(re.findall(r"^terrazzo(?:\.[a-z0-9_]+)*\.([a-z]\w*)\(", surface, re.MULTILINE))
    run = [block.text for page in PAGES for block in blocks_of(page) if block.note != "not run"]
    for file in modules_with_examples():
        run += re.findall(r"^ *(?:>>>|\.\.\.) (.*)", (ROOT / file).read_text(), re.MULTILINE)
    called = set(re.findall(r"\b(\w+)\(", "\n".join(run)))
    assert sorted(functions - called - WITHOUT_EXAMPLE) == []


def test_names_on_pages_exist():
    """`terrazzo.tensor.DTensor` in the text is public, or something that can be imported: that takes longer."""
    surface = (Path(__file__).parent / "public_surface.txt").read_text()
    public = set(re.findall(r"^(?:class )?(terrazzo(?:\.\w+)+)", surface, re.MULTILINE))
    public |= {name.rpartition(".")[0] for name in public}
    absent = []
    for page in PAGES:
        for name in re.findall(r"`(terrazzo(?:\.\w+)+)(?:\(.*?\))?`", page.read_text()):
            if name not in public and not _exists(name):
                absent.append(f"{page.relative_to(ROOT)}: {name}")
    assert absent == []


def _exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_pages_outside_of_the_site_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{name} links to {target}"


# ------------------------------------------------------------------ what runs the pages can fail


def _page(folder: Path, text: str) -> list:
    page = folder / "page.md"
    page.write_text(text.replace("'''", "```"))
    return blocks_of(page)


def run_wrong_page(text: str, folder: str) -> str:
    import page_code

    page_code.ROOT = Path(folder)
    (Path(folder) / "examples").mkdir()
    (Path(folder) / "page.md").write_text(text.replace("'''", "```"))
    (Path(folder) / "run").mkdir()
    try:
        run_page("page.md", str(Path(folder) / "run"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        page_code.ROOT = ROOT
    return "fine"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("'''python\n>>> 1 + 1\n3\n'''\n", "1 of 1 examples failed"),
        ("'''python\nx = 1\n'''\n\n'''python\nassert x == 2\n'''\n", "AssertionError"),
        ("'''python\nx = 1\n'''\n\n'''python\n>>> x\n1\n'''\n", "fine"),
        ("<!-- first: x = 2 -->\n\n'''python\nassert x == 2\n'''\n", "fine"),
        ("'''console\n$ echo one two\none three\n'''\n", "printed"),
        ("'''console\n$ echo one two\none ...\n'''\n", "fine"),
        ("'''sh\nfalse\ntrue\n'''\n", "ended with 1"),
        ("<!-- file: a/b.py -->\n'''python\nprint(3)\n'''\n\n'''console\n$ python a/b.py\n3\n'''\n", "fine"),
        ("<!-- alone -->\n\n'''python\nimport os\nassert 'RANK' in os.environ\n'''\n", "ended with 1"),
        ("<!-- not run: needs a cluster -->\n\n'''sh\nfalse\n'''\n", "fine"),
    ],
)
def test_a_page_with_wrong_code_is_found(text, told, tmp_path):
    assert told in run_ranks(1, run_wrong_page, text, str(tmp_path))[0]


def test_blocks_that_nobody_runs_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("page_code.ROOT", tmp_path)
    wrong = "'''\nx\n'''\n\ntext\n\n    indented\n\n<!-- not run: no -->\n\n'''sh\nls\n'''\n\n'''{toctree}\na\n'''\n"
    found = complaints_about(_page(tmp_path, wrong))
    assert [complaint.partition(": ")[0] for complaint in found] == ["page.md:2", "page.md:7", "page.md:12"]
