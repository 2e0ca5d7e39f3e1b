"""Measures a server by Triton's perf_analyzer, and prints how each run ended: `perf_analyzer_client.py HTTP GRPC`.

Of each run: the status, how many requests its client counted, how many the server said it answered, and its last words.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

http, grpc = sys.argv[1:]
PROGRAM = Path(sys.executable).with_name("perf_analyzer")
REQUESTS = 50


def measure(model, way, *words):
    """One run."""
    address = grpc if way == "grpc" else http
    command = [PROGRAM, "-m", model, "-i", way, "-u", address, "--request-count", str(REQUESTS), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = ran.stdout + ran.stderr
    counts = [re.search(rf"{name} count: (\d+)", said) for name in ("Request", "Successful request")]
    return [ran.returncode, *(int(found[1]) if found else 0 for found in counts), said.strip()[-300:]]


said = {}
for way in ("http", "grpc"):
    said[f"{way}"] = measure("sums", way, "-b", "2", "--concurrency-range", "4")
    said[f"{way}_async"] = measure("sums", way, "--async", "--concurrency-range", "4")
    said[f"{way}_memory"] = measure("sums", way, "--shared-memory", "system")
    said[f"{way}_texts"] = measure("shout", way, "--string-length", "5")
    said[f"{way}_counted"] = measure("counted", way)
    said[f"{way}_unknown"] = measure("other", way)
said["http_json"] = measure("sums", "http", "--input-tensor-format", "json", "--output-tensor-format", "json")
said["grpc_stream"] = measure("sums", "grpc", "--streaming", "--async")
print(json.dumps(said))
