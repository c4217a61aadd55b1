"""The device is compiled once, when it is first used, and says what is missing where it cannot be."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ranks import fresh_values
from terrazzo.errors import DeviceBuildError
from terrazzo.testing.late import build


def test_importing_compiles_nothing(tmp_path):
    """Also where there is no compiler; `terrazzo.testing` does not even import it."""
    program = (
        "import sys, terrazzo.testing; assert 'terrazzo.testing.late' not in sys.modules\n"
        "from terrazzo.testing import late; late.MODES, late.checked, late.init_process_group\n"
        "from terrazzo.errors import DeviceBuildError\n"
        "try: late.init()\n"
        "except DeviceBuildError as error: print(error)\n"
        "import torch; assert torch.accelerator.current_accelerator() is None or not torch.accelerator.is_available()\n"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "there is no 'g++' in PATH: install g++ 11 or newer" in done.stdout and "CXX" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no space left on this device' >&2\nexit 3\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TERRAZZO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DeviceBuildError, match="ended with 3") as raised:
        build.built()
    assert "no space left on this device" in str(raised.value)
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]


def test_the_library_is_kept_for_one_torch_compiler_and_source(tmp_path, monkeypatch):
    """Many threads and processes that need it at the same time compile it once."""
    runs = tmp_path / "runs"
    compiler = tmp_path / "cc"  # writes what it was asked for
    compiler.write_text(
        f'#!/bin/sh\nwhile [ $# -gt 1 ]; do if [ "$1" = -o ]; then echo x > "$2"; echo x >> "{runs}"; fi; shift; done\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TERRAZZO_CACHE", str(tmp_path / "cache"))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.built())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts = len(build._UNITS) + 1
    assert len(set(found)) == 1 and len(found) == 4 and len(runs.read_text().split()) == parts
    for change in (
        lambda: monkeypatch.setattr("torch.__version__", "9.9"),
        lambda: compiler.write_text(compiler.read_text().replace("#!/bin/sh\n", "#!/bin/sh\necho another version\n")),
        lambda: monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DX")),
    ):
        change()
        assert build.built() not in found
        found.append(build.built())
    assert len(runs.read_text().split()) == 4 * parts


def test_all_sources_are_compiled():
    listed = [name for unit in build._UNITS for name in unit]
    assert sorted(listed) == sorted(path.stem for path in build._SOURCES.glob("*.cpp"))


def run_plugin(folder: str) -> str:
    conftest = Path(folder, "conftest.py")
    conftest.write_text('pytest_plugins = ["terrazzo.testing.late.plugin"]\n')
    Path(folder, "test_mine.py").write_text(
        "import torch\n"
        "def test_right(late_device):\n"
        "    assert (torch.ones(2, device=late_device) * 2).sum().item() == 4\n"
        "def test_wrong(late_device):\n"
        "    x = torch.ones(2, device=late_device)\n"
        "    with torch.late.stream(torch.late.Stream()):\n"
        "        x + 1\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100).stdout


@pytest.mark.long
def test_the_plugin_runs_a_test_in_each_mode(tmp_path):
    try:
        build.built()
    except DeviceBuildError as error:
        pytest.skip(str(error).partition("\n")[0])
    (said,) = fresh_values(1, run_plugin, str(tmp_path))
    assert "10 passed, 5 errors" in said, said
    assert "RaceError" in said and "test_mine.py:7 in test_wrong" in said
