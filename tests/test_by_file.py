"""Files that are collected where they are run: every test and every file that cannot be imported is told, none lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.by_file import find_group

CONFTEST = """
import pytest
from support.by_file import ByFile
def pytest_configure(config):
    config.pluginmanager.register(ByFile(), "by_file")
@pytest.fixture(scope="session", autouse=True)
def once():
    with open("begun", "a") as file: file.write("x")
    yield
    with open("ended", "a") as file: file.write("x")
"""
FILES = {
    "test_good.py": (
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(3))\ndef test_it(number): pass\n"
        "@pytest.mark.long\ndef test_long(): assert 0\n"
    ),
    "test_bad.py": "def test_fails(): assert 0\ndef test_passes(): pass\n",
    "test_broken.py": "import no_such_module_anywhere\n",
    "test_absent.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
    # In this order, by size: a file without a test to run lies between two folders.
    "one/test_first.py": f"def test_it(): pass\n# {'x' * 3000}\n",
    "one/test_none.py": f"import pytest\n@pytest.mark.long\ndef test_long(): assert 0\n# {'x' * 2000}\n",
    "two/test_last.py": f"def test_it(): pass\n# {'x' * 1000}\n",
}


def run_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of this folder with our plug-in."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.system
def test_what_becomes_of_each_file_is_told(tmp_path: Path) -> None:
    """Passed, failed, deselected, skipped and broken, in one runner that sets session fixtures up once."""
    for name, source in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: x\n")

    ran = run_pytest(tmp_path, "-ra", "-q", "-m", "not long", "-n", "1", "--dist", "load")

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 6 passed, 1 skipped, 1 error" in ran.stdout
    assert "ERROR test_broken.py" in ran.stdout
    assert "FAILED test_bad.py::test_fails" in ran.stdout
    assert ((tmp_path / "begun").read_text(), (tmp_path / "ended").read_text()) == ("x", "x")


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("def test_it(): pass", None),
        ('torch = pytest.importorskip("torch")', "torch"),
        ('def test_it():\n    pytest.importorskip("torch", reason="x")', "torch"),
        ('pytest.importorskip("torchvision")', None),
        ("from support.running_pool import RunningPool", None),
        ("from support.running_pool import RunningPool\npytestmark = [pytest.mark.torch]", "torch_workers"),
        ('pytest.importorskip("torch")\npytestmark = [pytest.mark.torch]\nRunningPool(path)', "torch_workers"),
        ("def test_it(s3: S3Server): pass", "stand_ins"),
        ("from support.container import Container", "stand_ins"),
    ],
)
def test_files_that_share_what_is_slow_to_start_are_of_a_group(source: str, group: str | None) -> None:
    """torch in the runner, torch in the process that pools' workers are forked from, stand-ins; others have none."""
    assert find_group(source) == group


@pytest.mark.system
def test_one_runner_runs_a_group_and_the_others_the_rest(tmp_path: Path) -> None:
    """With `--dist loadgroup`; every file is run once, by its own name."""
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("begun", "/dev/null").replace("ended", "/dev/null"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    lines = "import os\ndef test_it():\n    open(os.environ['PYTEST_XDIST_WORKER'], 'a').write(__name__[-1])\n"
    for number in range(3):
        (tmp_path / f"test_torch{number}.py").write_text(f'{lines}# importorskip("torch"\n')
        (tmp_path / f"test_other{number + 3}.py").write_text(lines)

    ran = run_pytest(tmp_path, "-q", "-n", "2", "--dist", "loadgroup")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "6 passed" in ran.stdout
    ran_by = [(tmp_path / f"gw{number}").read_text() for number in range(2) if (tmp_path / f"gw{number}").exists()]
    assert sorted("".join(ran_by)) == list("012345")
    assert any("012" in "".join(sorted(numbers)) for numbers in ran_by)
