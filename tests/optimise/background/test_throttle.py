"""The family of a process keeps to its share of a core, and none of it stays stopped. Real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stops are Linux's")

# A child in a session of its own, with a child: both busy.
BUSY = """
import subprocess, sys
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "inner"])
while True:
    pass
"""
PROGRAM = """
import json, os, subprocess, sys, time
from marserve.lineage import family
from marserve.optimise.background.throttle import Throttle

os.nice(2)
with Throttle(0.25, 1) as throttle:
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=True)
    time.sleep(1.6)
    used, wall = sum(family(os.getpid()).values()), time.monotonic() - began
    with throttle.unthrottled():
        before = sum(family(os.getpid()).values())
        measured = time.monotonic()
        time.sleep(0.3)
        nice = os.getpriority(os.PRIO_PROCESS, child.pid)
        free = (sum(family(os.getpid()).values()) - before) / (time.monotonic() - measured)
    states = []
    for _ in range(20):
        time.sleep(0.02)
        with open(f"/proc/{child.pid}/stat") as file:
            states.append(file.read().rpartition(") ")[2][0])
with open(f"/proc/{child.pid}/stat") as file:
    after = file.read().rpartition(") ")[2][0]
pids = [pid for pid in family(os.getpid()) if pid != os.getpid()]
niced = os.getpriority(os.PRIO_PROCESS, child.pid)
told = {"used": used, "wall": wall, "free": free, "paid": "T" in states, "after": after, "nice": nice, "niced": niced}
print(json.dumps({**told, "pids": pids}))
for pid in pids:
    os.kill(pid, 9)
"""


def test_a_family_keeps_to_its_share_except_while_something_is_measured(tmp_path: object) -> None:
    """Processes in other sessions count; what the measurement used is paid for; none stays stopped."""
    busy, program = f"{tmp_path}/busy.py", f"{tmp_path}/program.py"
    for path, text in ((busy, BUSY), (program, PROGRAM)):
        with open(path, "w") as file:
            file.write(text)

    ran = subprocess.run([sys.executable, program, busy], capture_output=True, text=True, timeout=60, check=True)

    told = json.loads(ran.stdout)
    # A look may be a tenth of a second late, on two cores, and the start of the program counts.
    assert told["used"] <= 0.25 * told["wall"] + 0.6, told
    assert told["paid"], told
    assert told["after"] != "T", told
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    may_raise = os.geteuid() == 0
    assert told["niced"] == min(19, usual + 2)
    assert told["nice"] in ((1,) if may_raise else (1, told["niced"]))
    assert len(told["pids"]) == 2
    assert not [pid for pid in told["pids"] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
