"""Image start: how long from the engine's command to the digits model's first answer, beside importing torch there.

    python benchmarks/image_start.py --engine docker --image marserve:cpu --rounds 5

Each round starts a container, asks it every 5 ms until it has answered a picture, then has a fresh container of that
image import torch and another do nothing, so that the engine's own time is known. The first round warms the file cache
and is thrown away. `--flag` goes to every `run` of the engine (`--flag=--runtime=runc`). Port 8080 must be free.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "examples" / "digits" / "pictures" / "7.png"
ADDRESS = "http://127.0.0.1:8080/predictions/digits"
LIMIT_S = 120.0
GOAL_S = 2.0
IMPORT = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"


def main() -> int:
    """Measure, print a table, and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", default="docker")
    options.add_argument("--image", default="marserve:cpu")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--flag", action="append", default=[])
    given = options.parse_args()
    run = [given.engine, "run", *given.flag]
    answers, imports, engines = [], [], []
    for number in range(given.rounds + 1):
        answer = first_answer(given.engine, run, given.image)
        importing = float(output([*run, "--rm", given.image, "python", "-c", IMPORT]))
        began = time.perf_counter()
        output([*run, "--rm", "--entrypoint", "/bin/true", given.image])
        engine = time.perf_counter() - began
        if number:
            answers.append(answer)
            imports.append(importing)
            engines.append(engine)
    beyond = statistics.median(answer - importing for answer, importing in zip(answers, imports, strict=True))
    for name, times in (("first answer", answers), ("importing torch there", imports), ("a container at all", engines)):
        print(f"{name:24}{statistics.median(times):7.2f} s   {min(times):.2f} to {max(times):.2f}")
    print(f"{'beyond importing torch':24}{beyond:7.2f} s   goal: under {GOAL_S:g} s")
    return 0


def first_answer(engine: str, run: Sequence[str], image: str) -> float:
    """Seconds from the engine's command to the first good answer. The container is gone afterwards."""
    name = f"marserve-start-{uuid.uuid4().hex[:8]}"
    store = f"{ROOT / 'model_store'}:/home/model-server/model-store:ro"
    words = [*run, "--name", name, "-p", "8080:8080", "-v", store, image, "serve", "--models", "all"]
    asked = urllib.request.Request(ADDRESS, PICTURE.read_bytes(), {"Content-Type": "image/png"}, method="POST")
    began = time.perf_counter()
    container = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() < began + LIMIT_S:
            if container.poll() is not None:
                sys.exit(f"{' '.join(words)} ended with {container.returncode}")
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    answer.read()
                return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.005)
        sys.exit(f"no answer within {LIMIT_S:g} s")
    finally:
        subprocess.run([engine, "rm", "--force", "--volumes", name], capture_output=True, check=False)
        container.wait()


def output(words: Sequence[str]) -> str:
    """What a command prints; one that fails ends the measurement with what it said."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(words)} ended with {ran.returncode}: {ran.stderr}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
