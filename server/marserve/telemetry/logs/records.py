"""Lines of the logs as records that can be asked for: by model, request and level. Pure.

Reads both layouts that `logs.py` writes, from files and from what standard output got. A record is one line, or a line
and the lines of its traceback; lines of one worker and one millisecond about the same requests are one record, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote, unquote

LogName = Literal["server", "model", "access"]
LOGS: Final[tuple[LogName, ...]] = ("server", "model", "access")
LEVELS: Final = ("debug", "info", "warning", "error")

_RANKS = {"DEBUG": 0, "INFO": 1, "WARN": 2, "WARNING": 2, "ERROR": 3, "FATAL": 3, "CRITICAL": 3}
_STAMP = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3})"
_LINE = re.compile(rf"{_STAMP} \[(\w+) *\] (.*?) (\S+)(?: \[([^\]\s]*)\])? - (.*)", re.DOTALL)
_ACCESS = re.compile(rf'{_STAMP} - (/[^ ]* ".*)', re.DOTALL)
# The request line of an access line, its status, and the ids behind it.
_ANSWERED = re.compile(
    r'/[^ ]* "([^ ]*) (.*) [^ ]*" (\d+) \d+(?: ([A-Za-z0-9._:-]+))?(?: ([A-Za-z0-9._:-]+))?'
    r"(?: trace_id=([0-9a-f]{32}) span_id=[0-9a-f]{16})?(?: broken_off=([a-z_]+))?"
)
# Why streams are broken off by no fault of the server or the model.
_NO_FAULTS = ("client", "slow_reader", "draining")
_WORKER = re.compile(r"W-(\d+(?:\.\d+)?|template)-(.+)-(stdout|stderr)", re.DOTALL)
_INDENT = "    "
_METRICS = ("TS_METRICS", "MODEL_METRICS")
# A worker's traceback has a few hundred lines at most; other lines of one millisecond are no record without end.
MAX_RECORD_LINES: Final = 1000


@dataclass(slots=True)
class Record:
    """A record: `text` as the log has it, with all of its lines.

    `at` sorts within a log's layout. `source` is the worker of a model log (`m_1.0`), the target of an access log.
    `traces` are the ids of its requests' traces, with commas between them.
    """

    log: LogName
    at: str
    level: str
    ids: str
    source: str
    text: str
    lines: int = 1
    head: str = ""
    traces: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records are asked for; None and empty: any.

    `level` is the least one, of `LEVELS`. `versions` are the known versions of the model.
    """

    model: str | None = None
    request: str | None = None
    level: str | None = None
    logs: Collection[LogName] = LOGS
    versions: Collection[str] = ()

    def needles(self) -> list[bytes]:
        """Bytes of which one stands in every text that has a wanted record; empty if any may."""
        if self.request is not None:
            return [self.request.encode()]
        if self.model is not None:
            # As it stands in lines, in the targets of requests, and in JSON's escapes.
            escaped = json.dumps(self.model)[1:-1]
            return [each.encode() for each in dict.fromkeys((self.model, quote(self.model, safe=""), escaped))]
        if self.level == "error":
            return [b"ERROR", b"FATAL", b"CRITICAL", b'" 5', b'"status": 5']
        return []

    def filter(self) -> Callable[[Record], bool]:
        """Says of a record whether it is wanted."""
        tests: list[Callable[[Record], bool]] = [lambda record: record.log in self.logs]
        if self.level is not None:
            least = LEVELS.index(self.level)
            tests.append(lambda record: _RANKS.get(record.level, 1) >= least)
        if self.request is not None:
            tests.append(_about_request(self.request))
        if self.model is not None:
            tests.append(_about_model(self.model, self.versions))
        return lambda record: all(test(record) for test in tests)


def _about_request(request_id: str) -> Callable[[Record], bool]:
    # A sentence that names the request belongs to it as well: text lines need not have ids.
    named = re.compile(rf"(?<![A-Za-z0-9_.:-]){re.escape(request_id)}(?![A-Za-z0-9_-]|[.:][A-Za-z0-9])")

    def test(record: Record) -> bool:
        if record.ids and request_id in re.split("[,/]", record.ids):
            return True
        if record.traces and request_id in record.traces.split(","):
            return True
        return record.log != "access" and request_id in record.text and named.search(record.text) is not None

    return test


def _about_model(model: str, versions: Collection[str]) -> Callable[[Record], bool]:
    named = re.compile(rf"(?:(?:^|[^\w.-])|W-(?:[\d.]+|template)-){re.escape(model)}(?![A-Za-z0-9-])")
    workers = {f"{model}_{version}" for version in versions}

    def test(record: Record) -> bool:
        if record.log == "model":
            return record.source in workers or record.source.rpartition("_")[0] == model
        if record.log == "access":
            return model in map(unquote, record.source.partition("?")[0].split("/"))
        return named.search(record.text) is not None

    return test


def read_records(lines: Iterable[str], log: LogName | None = None) -> Iterator[Record]:
    """The records of these lines; `log` is None for lines of standard output, which has all logs.

    Lines before the first head are dropped: their record began earlier. So are metrics.
    """
    held: Record | None = None
    is_dropped = True  # lines that continue no record that is read
    for line in lines:
        if line.startswith(_INDENT):
            if held is not None and not is_dropped and held.lines < MAX_RECORD_LINES:
                held.text += "\n" + line
                held.lines += 1
            continue
        record = read_line(line, log)
        is_dropped = record is None
        if record is None:
            continue
        if (
            held is not None
            and record.log == "model"
            and record.head
            and record.head == held.head
            and held.lines < MAX_RECORD_LINES
        ):
            held.text += "\n" + record.text
            held.lines += 1
            continue
        if held is not None:
            yield held
        held = record
    if held is not None:
        yield held


def read_line(line: str, log: LogName | None) -> Record | None:
    """The record that begins with this line; None for a metric, an empty line, and one that no log has."""
    if line.startswith("{"):
        return _read_object(line, log)
    found = _LINE.fullmatch(line)
    if found is not None:
        at, level, thread, logger, ids, text = found.groups()
        if logger in _METRICS:
            return None
        if logger == "ACCESS_LOG":
            return _access(at, text, line)
        worker = _WORKER.fullmatch(thread) if logger == "MODEL_LOG" else None
        if worker is None:
            return Record("server", at, level, ids or "", "", line)
        return Record("model", at, level, ids or "", worker[2], line, head=line[: found.start(6)])
    found = _ACCESS.fullmatch(line)
    if found is not None:
        return _access(found[1], found[2], line)
    return Record("server", "", "INFO", "", "", line) if line and log != "access" else None


def _access(at: str, text: str, line: str) -> Record:
    answered = _ANSWERED.fullmatch(text)
    if answered is None:
        return Record("access", at, "INFO", "", "", line)
    _, target, status, own, theirs, trace_id, broken_off = answered.groups()
    ids = f"{own}/{theirs}" if theirs else own or ""
    return Record("access", at, _level_of(int(status), broken_off), ids, target, line, traces=trace_id or "")


def _level_of(status: int, broken_off: object) -> str:
    """The level of an access line: an error for the server's failures, broken streams among them.

    Over gRPC for a call that failed by it.
    """
    return "ERROR" if status >= 500 or (broken_off and broken_off not in _NO_FAULTS) else "INFO"


def _read_object(line: str, log: LogName | None) -> Record | None:
    try:
        read = json.loads(line)
    except ValueError:
        return Record("server", "", "INFO", "", "", line)
    logger, at, level = str(read.get("logger", "")), str(read.get("time", "")), str(read.get("level", "INFO"))
    if logger in _METRICS:
        return None
    ids = ",".join(_texts(read.get("request_id")) + _texts(read.get("client_request_id")))
    traces = ",".join(_texts(read.get("trace_id")))
    if logger == "ACCESS_LOG":
        status = read.get("status")
        level = _level_of(status, read.get("broken_off")) if isinstance(status, int) else level
        return Record("access", at, level, ids, str(read.get("target", "")), line, traces=traces)
    if logger == "MODEL_LOG":
        source = f"{read.get('model')}_{read.get('version')}"
        return Record("model", at, level, ids, source, line, traces=traces)
    return Record("server", at, level, ids, "", line, traces=traces)


def _texts(value: Any) -> list[str]:
    return [str(each) for each in value if each] if isinstance(value, list) else [str(value)] if value else []
