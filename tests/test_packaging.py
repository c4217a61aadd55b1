"""What `make wheel` makes: a wheel and an archive of the sources, from which the same wheel can be made."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = """
    Makefile constraints.txt pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE .ci/run
    src/terrazzo/py.typed src/terrazzo-install.pth tests/ranks.py docs/conf.py docs/pictures/layouts.svg
    examples/train.toml benchmarks/__main__.py
""".split()


def build(source: Path, kind: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's folder."""
    made = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(made) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def test_the_archive_has_what_building_and_testing_need(unpacked):
    for name in NEEDED:
        assert (unpacked / name).is_file(), name
    strange = [path for path in unpacked.rglob("*") if path.name in ("__pycache__", ".venv", "runs", ".git", "site")]
    assert strange == []


def test_the_wheel_of_the_archive_is_that_of_the_tree(unpacked, tmp_path):
    contents = []
    for number, source in enumerate((ROOT, unpacked)):
        (tmp_path / str(number)).mkdir()
        with zipfile.ZipFile(build(source, "wheel", tmp_path / str(number))) as wheel:
            contents.append({info.filename: info.CRC for info in wheel.infolist()})
    assert contents[0] == contents[1]
    names = set(contents[0])
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "terrazzo").rglob("*.py")}
    pages = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/terrazzo/view/page").iterdir()}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/terrazzo/testing/late/csrc").iterdir()}
    assert len(pages) > 10 and len(sources) > 10
    assert modules | pages | sources | {"terrazzo/py.typed", "terrazzo-install.pth"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"terrazzo"}, "nothing else is installed"
