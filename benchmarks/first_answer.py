"""First answer: what it takes from an empty folder to the first answer of a model of one's own.

    python benchmarks/first_answer.py [--rounds 5] [--only marserve,LitServe] [--json FILE] [--environments FOLDER]

The model is the same everywhere, four numbers in and three scores out by one product of numpy, written as each
server's own first page writes one, less what may be left out. Each way is a few files and commands, typed in an empty
folder; counted are the files, their lines that are not empty, the commands, the request among them, and the seconds
from the first command until the answer is right; beside it the processor time of all that ran until then, which other
work on the machine changes least. What is installed before does not count, and neither does the time of typing.

    marserve                marserve run, one file
    marserve, an archive    marserve archive, marserve start
    LitServe, BentoML       their own servers; BentoML without its reports (BENTOML_DO_NOT_TRACK)
    TorchServe              an archive and a model store; needs Java, and is left out where there is none

Peers are installed from the package index, each into an environment of the run's own; what cannot be installed is
left out, and said. `--environments` names a folder that keeps them for the next run. Ways take turns, in another
order each round, and the first round is thrown away: it warms the file cache. Ports are free ones: what a way is
given for that counts neither as a line nor as a command of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from peer_environment import CannotInstall, make_environment
from servers import free_ports

INSTALL_LIMIT_S = 1200.0
ANSWER_LIMIT_S = 120.0
END_LIMIT_S = 20.0
LOOK_EVERY_S = 0.01
REQUEST = {"x": [1, 2, 3, 4]}
SCORES = [60.0, 70.0, 80.0]

Say = Callable[[str], None]


class Walk(NamedTuple):
    """One walk of a way: seconds until the answer, and processor time until then of all that was started."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """How one server is brought to an answer: the files that are written and the commands that are typed.

    `{port}` stands for its port, `{port+1}` and so on for further ones. The last command serves; all before it end.
    `path` is where the request goes. `packages` are what pip installs; none for marserve, which the run's own
    interpreter has. `needs` are programs that must be there.
    """

    name: str
    files: Mapping[str, str]
    commands: Sequence[str]
    path: str
    packages: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    ports: int = 1

    @property
    def lines(self) -> int:
        """Lines that have something on them, of all files."""
        return sum(bool(line.strip()) for text in self.files.values() for line in text.splitlines())

    @property
    def typed(self) -> int:
        """Commands, and the request."""
        return len(self.commands) + 1


_MARSERVE = """\
import numpy
from marserve_handlers import model

WEIGHTS = numpy.arange(12.0).reshape(4, 3)


@model
def iris(item: dict) -> dict:
    return {"scores": (numpy.array(item["x"]) @ WEIGHTS).tolist()}
"""

_LITSERVE = """\
import litserve
import numpy

WEIGHTS = numpy.arange(12.0).reshape(4, 3)


class Iris(litserve.LitAPI):
    def predict(self, item):
        return {"scores": (numpy.array(item["x"]) @ WEIGHTS).tolist()}


if __name__ == "__main__":
    litserve.LitServer(Iris()).run(port={port})
"""

_BENTOML = """\
import bentoml
import numpy

WEIGHTS = numpy.arange(12.0).reshape(4, 3)


@bentoml.service
class Iris:
    @bentoml.api
    def predict(self, x: list[float]) -> dict:
        return {"scores": (numpy.array(x) @ WEIGHTS).tolist()}
"""

_TORCHSERVE = """\
import numpy

WEIGHTS = numpy.arange(12.0).reshape(4, 3)


def handle(data, context):
    if data is None:
        return None
    return [{"scores": (numpy.array(row["body"]["x"]) @ WEIGHTS).tolist()} for row in data]
"""

_ADDRESSES = {
    "inference_address": "http://127.0.0.1:{port}",
    "management_address": "http://127.0.0.1:{port+1}",
    "metrics_address": "http://127.0.0.1:{port+2}",
    "grpc_inference_port": "{port+3}",
    "grpc_management_port": "{port+4}",
}

WAYS = (
    Way(
        "marserve",
        {"iris.py": _MARSERVE},
        ["marserve run iris.py"],
        "/predictions/iris",
        environment={"MARSERVE_INFERENCE_ADDRESS": _ADDRESSES["inference_address"]},
    ),
    Way(
        "marserve, an archive",
        {"iris.py": _MARSERVE},
        [
            "mkdir model_store",
            "marserve archive iris --handler iris.py --export-path model_store",
            "marserve start --foreground --models iris.mar",
        ],
        "/predictions/iris",
        environment={f"MARSERVE_{key.upper()}": value for key, value in _ADDRESSES.items()},
        ports=5,
    ),
    Way(
        "LitServe",
        {"server.py": _LITSERVE},
        ["python server.py"],
        "/predict",
        packages=["litserve==0.2.19", "numpy"],
    ),
    Way(
        "BentoML",
        {"service.py": _BENTOML},
        ["bentoml serve service:Iris --port {port}"],
        "/predict",
        packages=["bentoml==1.4.40", "numpy"],
        environment={"BENTOML_DO_NOT_TRACK": "true"},
    ),
    Way(
        "TorchServe",
        {"iris.py": _TORCHSERVE},
        [
            "mkdir model_store",
            "torch-model-archiver --model-name iris --version 1.0 --handler iris.py --export-path model_store",
            "torchserve --start --foreground --model-store model_store --models iris.mar --disable-token-auth --ncs",
        ],
        "/predictions/iris",
        packages=[
            "setuptools<81",
            "torch==2.13.0",
            "torchserve==0.12.0",
            "torch-model-archiver==0.12.0",
            "numpy",
            "packaging",
            "pillow",
            "psutil",
            "pyyaml",
            "requests",
        ],
        needs=["java"],
        ports=5,
    ),
)


class NoAnswer(Exception):
    """A way did not come to a right answer; the text has what was said."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit status: 0 where everything that is there was measured."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", default=",".join(way.name for way in WAYS if "," not in way.name))
    options.add_argument("--json", type=Path)
    options.add_argument("--environments", type=Path)
    given = options.parse_args(words)
    asked = given.only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, and the folder removed
    with tempfile.TemporaryDirectory(prefix="first-answer-") as folder:
        programs = {}
        for way in WAYS:
            if way.name.partition(",")[0] not in asked:
                continue
            try:
                programs[way.name] = install(way, given.environments or Path(folder), _say)
            except CannotInstall as why:
                _say(f"{way.name} is left out: {why}")
        ways = [way for way in WAYS if way.name in programs]
        try:
            walks = measure(ways, programs, Path(folder), given.rounds, _say)
        except NoAnswer as why:
            _say(str(why))
            return 1
    print(table(ways, walks))
    if given.json is not None:
        given.json.write_text(json.dumps(document(ways, walks), indent=2) + "\n")
    return 0


def install(way: Way, folder: Path, say: Say) -> Path:
    """The folder of the programs of one way's environment, which is made. Raises CannotInstall."""
    if not way.packages:
        return Path(sys.executable).parent
    for program in way.needs:
        if shutil.which(program) is None:
            raise CannotInstall(f"needs {program}, which is not here")
    environment = folder.absolute() / f"{way.name}-environment"
    if (environment / "is-complete").exists():
        return environment / "bin"
    say(f"installing {way.name} into an environment of its own")
    make_environment(environment, way.packages, INSTALL_LIMIT_S)
    (environment / "is-complete").touch()
    return environment / "bin"


def measure(
    ways: Sequence[Way], programs: Mapping[str, Path], folder: Path, rounds: int, say: Say
) -> dict[str, list[Walk]]:
    """The walks of each way, by round. Raises NoAnswer."""
    walks: dict[str, list[Walk]] = defaultdict(list)
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming the file cache")
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            empty = folder / f"{way.name}-{number}"
            empty.mkdir()
            walked = walk(way, programs[way.name], empty)
            if number:
                walks[way.name].append(walked)
    return dict(walks)


def walk(way: Way, programs: Path, folder: Path) -> Walk:
    """Go one way in an empty folder until the right answer. Nothing runs afterwards. Raises NoAnswer."""
    first, *more = free_ports(way.ports)
    names = {"port": first, **{f"port+{number}": port for number, port in enumerate(more, 1)}}

    def filled(text: str) -> str:
        for name, port in names.items():
            text = text.replace(f"{{{name}}}", str(port))
        return text

    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MARSERVE_", "TS_", "PYTHON"))
    }
    environment |= {key: filled(value) for key, value in way.environment.items()}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    if way.name == "TorchServe":  # it reads ports from a file alone, which its user with free default ports needs not
        settings = folder.with_name(f"{folder.name}.properties")
        settings.write_text("".join(f"{key}={filled(value)}\n" for key, value in _ADDRESSES.items()))
        environment |= {"TS_CONFIG_FILE": str(settings), "LOG_LOCATION": str(folder.with_name("torchserve-logs"))}
    for name, text in way.files.items():
        (folder / name).write_text(filled(text))
    printed = folder.with_name(f"{folder.name}.log")
    began, ended_cpu_s = time.monotonic(), _cpu_s_of_ended()
    with printed.open("ab") as output:
        for command in way.commands[:-1]:
            done = subprocess.run(
                filled(command).split(), cwd=folder, env=environment, stdout=output, stderr=output, check=False
            )
            if done.returncode:
                raise NoAnswer(f"{way.name}: `{command}` ended with {done.returncode}:\n{_end_of(printed)}")
        server = subprocess.Popen(
            filled(way.commands[-1]).split(),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not is_answered(first, way.path):
            if server.poll() is not None or time.monotonic() - began > ANSWER_LIMIT_S:
                raise NoAnswer(f"{way.name} gave no right answer within {ANSWER_LIMIT_S:g} s:\n{_end_of(printed)}")
            time.sleep(LOOK_EVERY_S)
        took_s = time.monotonic() - began
        return Walk(took_s, _cpu_s_of_ended() - ended_cpu_s + cpu_s_of(server.pid))
    finally:
        end(server)


def is_answered(port: int, path: str) -> bool:
    """Whether the request gets its right answer now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, json.dumps(REQUEST), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and json.loads(answer.read()).get("scores") == SCORES
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def cpu_s_of(pid: int) -> float:
    """The processor time of a process and its descendants, and of those that have ended and were awaited."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += sum(each.cpu_times()[:4])  # user, system, and the same of its awaited children
    return total


def _cpu_s_of_ended() -> float:
    """The processor time of all that this process has started and awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end(server: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started in its session."""
    for number, limit_s in ((signal.SIGTERM, END_LIMIT_S), (signal.SIGKILL, END_LIMIT_S)):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(limit_s)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def table(ways: Sequence[Way], walks: Mapping[str, Sequence[Walk]]) -> str:
    """The figures as a table in Markdown."""
    rows = [
        "| | files | lines | commands | seconds | least to most | seconds of a processor |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for way in ways:
        taken = [walked.seconds for walked in walks[way.name]]
        counted = f"{len(way.files)} | {way.lines} | {way.typed}"
        timed = f"{median(taken):.2f} | {min(taken):.2f} to {max(taken):.2f}"
        cpu_s = median(walked.cpu_s for walked in walks[way.name])
        rows.append(f"| {way.name} | {counted} | {timed} | {cpu_s:.2f} |")
    return "\n".join(rows)


def document(ways: Sequence[Way], walks: Mapping[str, Sequence[Walk]]) -> list[dict[str, Any]]:
    """The figures with every round, for JSON."""
    return [
        {
            "name": way.name,
            "packages": list(way.packages),
            "files": len(way.files),
            "lines": way.lines,
            "commands": way.typed,
            "seconds": [walked.seconds for walked in walks[way.name]],
            "cpu_s": [walked.cpu_s for walked in walks[way.name]],
        }
        for way in ways
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_of(file: Path) -> str:
    return file.read_text(errors="replace")[-2000:]


if __name__ == "__main__":
    sys.exit(main())
