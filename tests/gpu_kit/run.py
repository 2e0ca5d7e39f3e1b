"""Runs tests/gpu or benchmarks/gpu.py on a machine with a GPU that reaches no package index.

    python3 tests/gpu_kit/run.py tests [--only WORDS]    all tests that need a device, or those that WORDS name (-k)
    python3 tests/gpu_kit/run.py bench [--works cnn]     the benchmarks, a work after the other

It makes an environment over this Python's own packages (Python 3.11 or 3.12 with torch 2.11 or newer, numpy and
Pillow), installs the wheels of `make gpu-kit` into it, and uses torch and the device once, so that what is slow only at
the first time is not measured. All of it takes nine minutes at most: what runs then is ended. `summary.txt` in `--out`
has a line for each thing when it is known, so a run that is cut off leaves what it saw; `tests.log` or `bench.log` has
everything.

The exit status is 0 if all went well, 1 if something failed, 3 without a device: then the tests are run all the same,
each to say so. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 540.0
# What is left to whatever is told to end, and then to clean up.
END_S = 20.0
NO_DEVICE = 3
WORKS = ("cnn", "resnet", "encoder")
_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$")

WARM_UP = """
import sys, time
began = time.monotonic()
missing = []
for name in ("torch", "numpy", "PIL"):
    try:
        __import__(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    print("missing here: " + ", ".join(missing)); sys.exit(1)
import torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
print(f"torch {torch.__version__} for CUDA {torch.version.cuda}, imported in {time.monotonic() - began:.1f} s")
if version < (2, 11):
    print("this torch is older than 2.11, with which nothing was tried")
if not torch.cuda.is_available():
    sys.exit(3)
for number in range(torch.cuda.device_count()):
    it = torch.cuda.get_device_properties(number)
    print(f"device {number}: {it.name}, {it.total_memory >> 20} MiB, capability {it.major}.{it.minor}")
    ones = torch.ones(1024, 1024, device=f"cuda:{number}")
    assert (ones @ ones).sum().item() == 1024.0**3
    torch.nn.functional.conv2d(torch.ones(1, 3, 64, 64, device=ones.device), torch.ones(8, 3, 3, 3, device=ones.device))
    torch.cuda.synchronize(number)
print(f"warm after {time.monotonic() - began:.1f} s")
"""


class Summary:
    """Lines with their time since the start, in a file and on the terminal, each as soon as it is known."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._began = time.monotonic()
        file.write_text("")

    def say(self, text: str) -> None:
        """Add lines."""
        with self._file.open("a") as out:
            for line in text.splitlines() or [""]:
                told = f"{time.monotonic() - self._began:6.1f} s  {line}"
                out.write(told + "\n")
                print(told, flush=True)


class Failed(Exception):
    """The run cannot go on; the message says why."""


class Run:
    """One run, with its end."""

    def __init__(self, kit: Path, out: Path, environment: Path, most_s: float = MOST_S) -> None:
        self.kit, self.out, self.environment = kit, out, environment
        self.summary = Summary(out / "summary.txt")
        self._end = time.monotonic() + most_s

    @property
    def left_s(self) -> float:
        """Time left for what is run, so that it can still be ended."""
        return self._end - END_S - time.monotonic()

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.environment / "bin/python")

    def prepare(self) -> bool:
        """Make the environment and warm up. Returns whether there is a device. Raises Failed."""
        if sys.version_info[:2] not in ((3, 11), (3, 12)):
            raise Failed(f"the kit is for Python 3.11 and 3.12, and this is {sys.version.split()[0]}")
        pinned = self.kit / "requirements.txt"
        if not pinned.exists():
            raise Failed(f"{pinned} is not there: make the kit with `make gpu-kit`, and bring {self.kit} along")
        self._install(pinned)
        return self._warm_up()

    def _install(self, pinned: Path) -> None:
        stamp = self.environment / "kit.txt"
        made_of = "\n".join([sys.prefix, sys.version, *sorted(wheel.name for wheel in self.kit.glob("wheels/*.whl"))])
        if stamp.exists() and stamp.read_text() == made_of:
            self.summary.say(f"the environment {self.environment} is there")
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        self._must([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(self.environment)])
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, "install"]
        # All of it, whatever the machine has of it already: what is tested is known then.
        options = ["--quiet", "--no-index", "--no-deps", "--ignore-installed", "--find-links", str(self.kit / "wheels")]
        self._must([*pip, *options, "-r", str(pinned)])
        if sys.prefix != sys.base_prefix:
            self._see_packages_of_this_environment()
        stamp.write_text(made_of)
        self.summary.say(f"installed {len(pinned.read_text().splitlines())} packages into {self.environment}")

    def _see_packages_of_this_environment(self) -> None:
        """An environment made by an environment's Python sees its base's packages alone: torch may not be there."""
        (packages,) = self.environment.glob("lib/python3*/site-packages")
        (packages / "zz_parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    def _warm_up(self) -> bool:
        status, said = self._call([self.python, "-c", WARM_UP])
        self.summary.say(said.strip())
        if status == NO_DEVICE:
            self.summary.say("There is no device here: torch.cuda.is_available() is False.")
        elif status:
            raise Failed(f"torch and the device cannot be used (status {status})")
        return status == 0

    def _must(self, command: list[str]) -> None:
        status, said = self._call(command)
        if status:
            raise Failed(f"{' '.join(command)} ended with status {status}:\n{said[-2000:]}")

    def _call(self, command: list[str]) -> tuple[int, str]:
        lines: list[str] = []
        status = self.stream(command, "setup.log", lines.append)
        return status, "".join(lines)

    def stream(self, command: list[str], log: str, hear: Callable[[str], None], within_s: float = MOST_S) -> int:
        """Run a program in the checkout, with each line that it prints added to a log, too. Returns its status.

        At the end of the time it is told to end (SIGTERM; tests as by Ctrl-C), then killed with what it started.
        """
        limit_s = max(0.0, min(within_s, self.left_s))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MARSERVE_"))
        }
        with (self.out / log).open("a") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment | {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True,
            )  # fmt: skip
            timers = [
                threading.Timer(limit_s, self._tell_to_end, (process, command)),
                threading.Timer(limit_s + END_S - 2, _kill, (process,)),
            ]
            for timer in timers:
                timer.daemon = True
                timer.start()
            assert process.stdout is not None
            with process.stdout as printed:
                for line in printed:
                    out.write(line)
                    out.flush()
                    hear(line)
            status = process.wait()
            for timer in timers:
                timer.cancel()
        return status

    def _tell_to_end(self, process: subprocess.Popen[str], command: list[str]) -> None:
        self.summary.say(f"the time is over: {command[1:3]} is ended")
        process.send_signal(signal.SIGINT if "pytest" in command else signal.SIGTERM)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_tests(run: Run, only: str, folder: str = "tests/gpu") -> bool:
    """Run the tests that need a device. Returns whether none failed, and all were run."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    def hear(line: str) -> None:
        if (found := _RESULT.match(line)) is not None:
            counts[found[2].lower()] += 1
            run.summary.say(f"{found[2]:8}{found[1]}")
        elif (found := _SKIPPED.match(line)) is not None:
            reasons[found[2]] += int(found[1])
        elif line.startswith("E  "):
            run.summary.say(f"        {line.rstrip()[:300]}")

    # Warnings of the machine's own packages are no failures.
    options = ["-v", "-rs", "-W", "default", "-p", "no:cacheprovider", "--color=no", "--maxfail=50"]
    plugins = ["-p", "pytest_timeout", "-p", "anyio"]
    marked = ["-m", "gpu and (long or not long)", *(["-k", only] if only else [])]
    status = run.stream([run.python, "-m", "pytest", folder, *options, *plugins, *marked], "tests.log", hear)
    for reason, count in reasons.items():
        run.summary.say(f"skipped {count} times: {reason}")
    run.summary.say(", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "no test was run")
    run.summary.say(f"pytest ended with status {status}")
    return status == 0


def run_bench(run: Run, works: list[str], device: str = "cuda") -> bool:
    """Measure one work after the other, each with its share of the time. Returns whether all of it was."""
    is_whole = True
    for number, work in enumerate(works):
        file = run.out / f"{work}.json"
        program = [run.python, "benchmarks/gpu.py", "--device", device, "--works", work, "--rounds", "3"]
        share_s = (run.left_s - END_S * (len(works) - 1 - number)) / (len(works) - number)
        began = time.monotonic()
        status = run.stream([*program, "--json", str(file)], "bench.log", lambda line: None, share_s)
        run.summary.say(f"{work}: status {status} after {time.monotonic() - began:.0f} s")
        is_whole &= status == 0
        for figure in json.loads(file.read_text())["figures"] if file.exists() else ():
            run.summary.say("  " + json.dumps(figure))
    return is_whole


def main(words: list[str] | None = None) -> int:
    """Read the command line and run. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Run marserve's tests or benchmarks on a machine with a GPU.")
    parser.add_argument("what", choices=("tests", "bench"))
    parser.add_argument("--only", default="", metavar="WORDS", help="tests: those that pytest's -k takes")
    parser.add_argument("--works", default=",".join(WORKS), help="bench: which, with commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-run", help="where results go")
    parser.add_argument("--kit", type=Path, default=ROOT / "build/gpu-kit", help="what `make gpu-kit` made")
    parser.add_argument("--env", type=Path, default=ROOT / "build/gpu-env", help="where the environment is made, or is")
    said = parser.parse_args(words)
    run = Run(said.kit.resolve(), said.out.resolve(), said.env.resolve())
    try:
        has_device = run.prepare()
        if said.what == "tests":
            is_well = run_tests(run, said.only)
        elif has_device:
            is_well = run_bench(run, said.works.split(","))
        else:
            is_well = True
    except Failed as error:
        run.summary.say(f"{error}")
        return 1
    return 1 if not is_well else 0 if has_device else NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
