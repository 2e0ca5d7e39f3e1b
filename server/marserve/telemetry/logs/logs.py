"""The server log, model log, access log and the two logs of metrics: files, layouts, standard output.

Text has TorchServe's layout, in `access_log.log`, `ts_log.log`, `model_log.log`, `ts_metrics.log` and
`model_metrics.log`; `json` writes one object a line. Logging never blocks the caller: each file and standard output
has a `LineWriter` of its own. If an outlet cannot be written, only its lines are lost, and counted. Text of clients and
handlers cannot break a line or forge one: control characters, bidirectional ones among them, are escaped, and the
lines of a traceback are indented. `line_ids.py` knows which requests a line belongs to; an access line's id is put at
its end by `api/http/listener.py`, and over gRPC by `access_log.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from marserve.errors import BadSettings
from marserve.messages import TRACE_MARK, without_traces
from marserve.names import escaped
from marserve.telemetry.logs.access_log import AccessLog, AccessRecord, Sampling, TextAccessLog
from marserve.telemetry.logs.line_ids import TRACEBACK, ids_of
from marserve.telemetry.logs.line_writer import DescriptorSink, LineWriter, RollingFile, Sink
from marserve.telemetry.logs.log_book import LogBook
from marserve.telemetry.logs.log_limit import LIBRARIES, LogLimit
from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.recent_lines import RecentLines, ShownSink
from marserve.telemetry.logs.search import FILES
from marserve.telemetry.logs.worker_lines import WorkerLines

log = logging.getLogger("marserve.telemetry")

LogFormat = Literal["text", "json"]

# Of the lines that standard output got, so that they can be asked for where no file has them.
KEPT_BYTES = 8 << 20
_MAX_TEXT = 8192
_MAX_LABEL = 80
_STDOUT = 1
# Libraries that log what they carry: headers with keys, addresses with signatures.
_CARRIERS = ("boto3", "botocore", "hpack", "httpcore", "httpcore2", "httpx", "httpx2", "urllib3")
_METRICS_FILES = {"TS_METRICS": "ts_metrics", "MODEL_METRICS": "model_metrics"}


def configure_logs(
    *,
    folder: Path | None,
    format: LogFormat = "text",
    to_stdout: bool = True,
    level: str = "info",
    has_request_ids: bool = False,
    has_line_ids: bool = False,
    metrics_folder: Path | None = None,
    has_metrics: bool = False,
    stdout: int = _STDOUT,
    with_own_paths: Callable[[str], str] | None = None,
    sampling: Sampling | None = None,
) -> Logs:
    """Open the logs and take over Python's logging, until the result is closed.

    `folder` gets the three files and is created; None for no files. `level` is the least level of the server log; the
    model log takes all. `has_request_ids`: lines of the access log end with the request's id; `has_line_ids`: lines of
    the server log and the model log name the requests that they belong to. JSON always does both.
    `metrics_folder` (by default `folder`) gets the two files of metrics, which stay empty unless `has_metrics`.
    `stdout` is the descriptor to write to. `with_own_paths` gives what a worker printed or raised the paths of its
    author's files, where workers run copies; it is called on any thread. `sampling` is the access log's.

    Raises BadSettings if a folder or a file in it cannot be opened.
    """

    def make_encoder() -> _JsonEncoder | _TextEncoder:
        return _JsonEncoder(sampling) if format == "json" else _TextEncoder(has_ids=has_line_ids)

    files: dict[str, LineWriter[LogRecord]] = {}
    outlets: list[RecentLines] = []
    if folder is not None:
        with _opening(folder, "logs", "log_location", files):
            for log_name, name in FILES.items():
                outlets.append(RecentLines(log_name))
                sink = ShownSink(RollingFile(folder / f"{name}.log"), outlets[-1])
                files[name] = _writer(f"{name}.log", sink, make_encoder())
    _open_metrics_files(metrics_folder or folder, has_metrics, files, make_encoder)
    console: list[LineWriter[LogRecord]] = []
    if to_stdout:
        printed: Sink = DescriptorSink(stdout)
        if not outlets:
            outlets.append(RecentLines(most_bytes=KEPT_BYTES))
            printed = ShownSink(printed, outlets[-1])
        console = [_writer("stdout", printed, make_encoder())]
    for writer in (*files.values(), *console):
        writer.start()
    book = LogBook(folder, outlets)
    return Logs(
        files,
        console,
        level,
        make_encoder,
        book,
        has_request_ids=has_request_ids,
        with_own_paths=with_own_paths,
        sampling=sampling,
    )


def _open_metrics_files(
    folder: Path | None,
    has_metrics: bool,
    files: dict[str, LineWriter[LogRecord]],
    make_encoder: Callable[[], Callable[[Sequence[LogRecord | str]], str]],
) -> None:
    """Add the writers of the two files of metrics. Without `has_metrics` only create the files."""
    if folder is None:
        return
    paths = {name: folder / f"{name}.log" for name in _METRICS_FILES.values()}
    if has_metrics:
        with _opening(folder, "metrics", "metrics_location", files):
            for name, path in paths.items():
                files[name] = _writer(path.name, RollingFile(path), make_encoder(), capacity=4096)
    else:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for path in paths.values():
                path.touch()


@contextlib.contextmanager
def _opening(folder: Path, what: str, key: str, files: Mapping[str, LineWriter[LogRecord]]) -> Iterator[None]:
    """Make the folder, for files to be opened there. Raises BadSettings if that fails, and closes all `files`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        for writer in files.values():
            writer.start()
            writer.close(0)
        raise BadSettings(
            f"{key} is {str(folder)!r}, where {what} cannot be written ({error.strerror}); name a folder that the "
            f"server may write to, with {key} or {key.upper()}",
            key=key,
        ) from error


class Logs:
    """The open logs. Surfaces write to `access`, pools to `workers`; other parts use `logging`. `book` is asked."""

    def __init__(
        self,
        files: dict[str, LineWriter[LogRecord]],
        console: list[LineWriter[LogRecord]],
        level: str,
        make_encoder: Callable[[], _JsonEncoder | _TextEncoder],
        book: LogBook,
        *,
        has_request_ids: bool = False,
        with_own_paths: Callable[[str], str] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.book = book
        self.with_own_paths = with_own_paths
        encoder = make_encoder()
        self._json_encoder = encoder if isinstance(encoder, _JsonEncoder) else None

        def writers(name: str) -> list[LineWriter[LogRecord]]:
            return [files[name], *console] if name in files else console

        access = cast("list[LineWriter[AccessRecord]]", writers("access_log"))  # an AccessRecord is a LogRecord
        if self._json_encoder is not None:
            self.access = AccessLog(access, has_ids=True, sampling=sampling)
        else:
            heads = _AccessHeads([writer in console for writer in access])
            self.access = TextAccessLog(access, heads, has_ids=has_request_ids, sampling=sampling)
        self.workers = WorkerLog(writers("model_log"), make_encoder().lines, with_own_paths)
        self._metrics_stamps = _LocalStamps()
        self._metrics = {name: writers(_METRICS_FILES[name]) for name in _METRICS_FILES}
        self._console = console
        self._writers = [*files.values(), *console]
        self._handler = _ServerLogHandler(writers("ts_log"), with_own_paths)
        root = logging.getLogger()
        self._before = root.level, root.handlers[:]
        root.handlers[:] = [self._handler]
        self.level = level
        root.setLevel(level.upper())
        self._levels_before = [(logger, logger.level) for logger in map(logging.getLogger, _CARRIERS)]
        for logger, _ in self._levels_before:
            logger.setLevel(logging.WARNING)

    def set_level(self, level: str) -> None:
        """Change the least level of the server log: `debug`, `info`, `warning` or `error`."""
        logging.getLogger().setLevel(level.upper())
        log.log(max(logging.INFO, logging.getLogger().level), "The server log has the level %s now", level)
        self.level = level

    def tell_left_out(self, now: float) -> None:
        """Log how many records, caused by clients, were left out since the last report."""
        self._handler.tell_left_out(now)

    def announce(self, text: str) -> None:
        """Write `text` to standard output as a line of its own: scripts that start the server look for it."""
        for writer in self._console:
            writer.write(Announcement(time.time(), text))

    def write_metrics(self, name: str, lines: Sequence[str]) -> None:
        """Write lines of metrics; `name` is TS_METRICS or MODEL_METRICS. Never blocks; for one thread only.

        The caller ensures that nothing in a line breaks it.
        """
        now = time.time()
        text = self._json_encoder.metrics(now, name, lines) if self._json_encoder is not None else ""
        stamp = self._metrics_stamps.of(int(now * 1000))
        for writer in self._metrics[name]:
            if self._json_encoder is None:
                head = f"{stamp} [INFO ] metrics {name} - " if writer in self._console else f"{stamp} - "
                text = head + f"\n{head}".join(lines)
            writer.write(text)

    def dropped(self) -> dict[str, int]:
        """How many lines each outlet has lost, by its name; `workers`: lines of workers beyond the budget."""
        return {"workers": self.workers.budget.left_out, **{writer.name: writer.dropped for writer in self._writers}}

    def close(self, timeout_s: float = 2.0) -> None:
        """Restore Python's logging, write what waits (at most `timeout_s` an outlet), end the threads."""
        root = logging.getLogger()
        self._handler.tell_left_out(math.inf)
        if self._handler in root.handlers:
            root.setLevel(self._before[0])
            root.handlers[:] = self._before[1]
            for logger, level in self._levels_before:
                logger.setLevel(level)
        self.access.flush()
        for writer in self._writers:
            writer.close(timeout_s)


class WorkerLog:
    """Writes what workers print. Never blocks; for one thread only.

    `encode` makes finished text of lines. `budget` bounds them; the caller drops the rest.
    """

    def __init__(
        self,
        writers: list[LineWriter[LogRecord]],
        encode: Callable[[float, WorkerLines], str],
        with_own_paths: Callable[[str], str] | None = None,
    ) -> None:
        self.budget = OutputBudget()
        self._writers = writers
        self._encode = encode
        self._with_own_paths = with_own_paths

    def write(self, lines: WorkerLines) -> None:
        """Log records of a worker."""
        if self._with_own_paths is not None:
            lines = lines._replace(texts=[self._with_own_paths(text) for text in lines.texts])
        if any(len(text) > _MAX_TEXT for text in lines.texts):
            texts = ["\n".join([_bounded(line) for line in text.split("\n")]) for text in lines.texts]
            lines = lines._replace(texts=texts)
        text = self._encode(time.time(), lines)
        for writer in self._writers:
            writer.write_lines(text, text.count("\n") + 1)


def _bounded(line: str) -> str:
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}… ({len(line) - _MAX_TEXT} more characters)"


class ServerLine(NamedTuple):
    """A record of the server log. `exception` is its traceback as text, `ids` those of its requests."""

    at: float
    level: str
    thread: str
    logger: str
    text: str
    exception: str | None = None
    ids: str = ""


class Announcement(NamedTuple):
    """A bare line for standard output."""

    at: float
    text: str


LogRecord = AccessRecord | ServerLine | Announcement


class _ServerLogHandler(logging.Handler):
    """Passes records of Python's logging on. It makes their text at once, as arguments may change later.

    `telemetry/logs/log_limit.py` bounds records that clients cause: those of libraries, and those whose call says so
    with `caused_by`.
    """

    def __init__(
        self, writers: list[LineWriter[LogRecord]], with_own_paths: Callable[[str], str] | None = None
    ) -> None:
        super().__init__()
        self._writers = writers
        self._with_own_paths = with_own_paths
        self._formatter = logging.Formatter()
        self._limit = LogLimit()

    def tell_left_out(self, now: float) -> None:
        """Write how many records were left out, for each kind that is due."""
        with self.lock or contextlib.nullcontext():
            for sentence in self._limit.sentences(now):
                line = ServerLine(time.time(), "WARNING", "main", __name__, sentence)
                for writer in self._writers:
                    writer.write(line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError) as error:
            text = f"{record.msg!r} with arguments that do not fit it ({error})"
        exception = self._formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
        exception = exception or getattr(record, TRACEBACK, None)
        if self._with_own_paths is not None:
            text = self._with_own_paths(text)
            exception = None if exception is None else self._with_own_paths(exception)
        client: str | None = getattr(record, "client", None)
        if client is not None or record.name.partition(".")[0] in LIBRARIES:
            kind, label = f"{record.pathname}:{record.lineno}", str(record.msg)[:_MAX_LABEL]
            text, exception = _cut(text), None if exception is None else _cut(exception)
            size = len(text) + len(exception or "")
            if not self._limit.admit(kind, label, client or "", size, time.monotonic()):
                return
        thread = "main" if record.threadName in (None, "MainThread") else str(record.threadName)
        line = ServerLine(record.created, record.levelname, thread, record.name, text, exception, ids_of(record))
        for writer in self._writers:
            writer.write(line)


def _writer(
    name: str, sink: Sink, encode: Callable[[Sequence[LogRecord | str]], str], capacity: int = 32_768
) -> LineWriter[LogRecord]:
    def describe_loss(count: int) -> LogRecord:
        text = f"{count} lines of {name} were lost: it could not be written, or they came faster than it could be"
        return ServerLine(time.time(), "WARNING", f"log-{name}", __name__, text)

    def tell(trouble: str | None) -> None:
        if trouble is None:
            log.warning("%s is written again", name)
        else:
            log.error("%s cannot be written (%s): its lines are lost until it can", name, trouble)

    return LineWriter(name, sink, encode, describe_loss, capacity, on_trouble=tell)


_TEXT_LEVELS = {
    "DEBUG": "DEBUG",
    "INFO": "INFO ",
    "WARNING": "WARN ",
    "WARN": "WARN ",
    "ERROR": "ERROR",
    "CRITICAL": "FATAL",
    "FATAL": "FATAL",
}
_quote = json.encoder.encode_basestring_ascii


class _TextEncoder:
    """Records in TorchServe's layout: local time with milliseconds, level padded to five, thread, logger.

    With `has_ids` the requests of a line follow the logger, `MODEL_LOG [a,b] - text`, where no text can forge them.
    Lines of the access log and of metrics are finished already.
    """

    def __init__(self, *, has_ids: bool = False) -> None:
        self._has_ids = has_ids
        self._stamps = _LocalStamps()

    def __call__(self, records: Sequence[LogRecord | str]) -> str:
        return "\n".join([record if isinstance(record, str) else self._text(record) for record in records])

    def lines(self, at: float, said: WorkerLines) -> str:
        """Records of a worker, each line with the whole head."""
        level = _TEXT_LEVELS.get(said.level, "INFO ")
        thread = f"W-{said.worker_id}-{said.model}_{said.version}-{said.stream}"
        ids = f" [{without_traces(said.ids)}]" if said.ids and self._has_ids else ""
        head = f"{self._stamps.of(int(at * 1000))} [{level}] {_clean(thread)} MODEL_LOG{ids} - "
        return head + f"\n{head}".join([_clean(line) for text in said.texts for line in text.split("\n")])

    def _text(self, record: LogRecord) -> str:
        stamp = self._stamps.of(int(record[0] * 1000))
        if isinstance(record, ServerLine):
            level = _TEXT_LEVELS.get(record.level, record.level)
            ids = f" [{without_traces(record.ids)}]" if record.ids and self._has_ids else ""
            text = f"{stamp} [{level}] {_clean(record.thread)} {record.logger}{ids} - {_clean(record.text)}"
            if record.exception:
                text += "".join(f"\n    {_clean(line)}" for line in record.exception.split("\n"))
            return text
        return _clean(record[1])


class _AccessHeads:
    """The head of a line of the access log: the time in its own file; on standard output also the log's name.

    `are_shared` says for each outlet whether other logs' lines go there.
    """

    def __init__(self, are_shared: Sequence[bool]) -> None:
        self._markers = [" [INFO ] access ACCESS_LOG - " if is_shared else " - " for is_shared in are_shared]
        self._stamps = _LocalStamps()

    def __call__(self, at_ms: int) -> list[str]:
        stamp = self._stamps.of(at_ms)
        return [stamp + marker for marker in self._markers]


class _LocalStamps:
    """Local times as text, `2026-01-31T12:00:00,007`. For one thread, as it caches the last second."""

    def __init__(self) -> None:
        self._second, self._second_text = -1, ""

    def of(self, at_ms: int) -> str:
        """The text of a time in milliseconds since the epoch."""
        second, millisecond = divmod(at_ms, 1000)
        if second != self._second:
            self._second, self._second_text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
        return f"{self._second_text},{millisecond:03}"


class _JsonEncoder:
    """Records as one object a line. Times are UTC. JSON's escapes keep each object on its line."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self._second, self._second_text = -1, ""
        self._sampling = sampling

    def __call__(self, records: Sequence[LogRecord | str]) -> str:
        return "\n".join([record if isinstance(record, str) else self._text(record) for record in records])

    def metrics(self, at: float, logger: str, lines: Sequence[str]) -> str:
        """Lines of metrics, all of one time."""
        head = f'{{"time": "{self._stamp(at)}", "level": "INFO", "logger": "{logger}", "message": '
        return "\n".join([f"{head}{_quote(line)}}}" for line in lines])

    def lines(self, at: float, said: WorkerLines) -> str:
        """Records of a worker: one object each."""
        fields = {
            "time": self._stamp(at),
            "level": said.level,
            "logger": "MODEL_LOG",
            "model": said.model,
            "version": said.version,
            "worker": said.worker_id,
            "stream": said.stream,
            **_id_members(said.ids),
        }
        head = json.dumps(fields)[:-1]
        return "\n".join([f"{head}, {_message_members(text)}}}" for text in said.texts])

    def _text(self, record: LogRecord) -> str:
        fields: dict[str, Any]
        if type(record) is tuple:
            return (
                f'{{"time": "{self._stamp(record[0])}", "level": "INFO", "logger": "ACCESS_LOG", '
                f"{_access(record[1], self._sampling)}}}"
            )
        if isinstance(record, ServerLine):
            fields = {
                "level": record.level,
                "logger": record.logger,
                "thread": record.thread,
                **_id_members(record.ids),
                "message": record.text,
            }
            if record.exception:
                fields["exception"] = record.exception
        else:
            fields = {"level": "INFO", "logger": "marserve", "message": record[1]}
        return json.dumps({"time": self._stamp(record[0]), **fields})

    def _stamp(self, at: float) -> str:
        second = int(at)
        if second != self._second:
            self._second, self._second_text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int(at % 1 * 1000):03}Z"


def _id_members(ids: str) -> dict[str, Any]:
    """`request_id` of these ids, and `client_request_id` if clients' ids stand beside them; lists for several requests.

    So are `trace_id` and `span_id`, where traces are made.
    How many were left out is `more_requests`.
    """
    if not ids:
        return {}
    members: dict[str, Any] = {}
    each_of = [each.split(TRACE_MARK) for each in ids.split(",")]
    pairs = [each[0].partition("/") for each in each_of]
    if pairs[-1][0].startswith("+"):
        members["more_requests"] = int(pairs.pop()[0])
    traces = [each[1:] for each in each_of if len(each) == 3]
    for name, found in (
        ("request_id", [own for own, _, _ in pairs]),
        ("client_request_id", [c for _, _, c in pairs]),
        ("trace_id", [trace_id for trace_id, _ in traces]),
        ("span_id", [span_id for _, span_id in traces]),
    ):
        if any(found):
            members[name] = found[0] if len(found) == 1 else found
    return members


_FIRST_LINE = "Traceback (most recent call last):"


def _message_members(text: str) -> str:
    """`message`, and `exception` if a record ends with a traceback; written without an encoder."""
    if text.startswith(_FIRST_LINE):
        last = text.rstrip("\n").rpartition("\n")[2]
        return f'"message": {_quote(last)}, "exception": {_quote(text)}'
    message, mark, traceback = text.partition(f"\n{_FIRST_LINE}")
    if not mark:
        return f'"message": {_quote(text)}'
    return f'"message": {_quote(message)}, "exception": {_quote(mark[1:] + traceback)}'


_ACCESS_LINE = re.compile(
    r'/([^ ]*) "([^ ]*) (.*) ([^ ]*)" ([0-9]+) ([0-9]+)(?: ([A-Za-z0-9._:-]+)(?: ([A-Za-z0-9._:-]+))?)?'
    r"(?: trace_id=([0-9a-f]{32}) span_id=([0-9a-f]{16}))?(?: broken_off=([a-z_]+))?",
    re.DOTALL,
)


def _access(line: str, sampling: Sampling | None) -> str:
    """The members of an access line's object, written without an encoder, as this runs for each request.

    `sample` is the share of such requests that have a line, where not all have one.
    """
    found = _ACCESS_LINE.fullmatch(line)
    if found is None:
        return f'"message": {json.dumps(line)}'
    peer, method, target, protocol, status, milliseconds = found.groups()[:6]
    request_id, client_id, trace_id, span_id, broken_off = found.groups()[6:]
    texts = ", ".join(
        f'"{name}": {_quote(text)}'
        for name, text in (("peer", peer), ("method", method), ("target", target), ("protocol", protocol))
    )
    line = f'{texts}, "status": {status}, "milliseconds": {milliseconds}'
    if request_id:
        line = f'{line}, "request_id": "{request_id}"'
    if client_id:
        line = f'{line}, "client_request_id": "{client_id}"'
    if trace_id:
        line = f'{line}, "trace_id": "{trace_id}", "span_id": "{span_id}"'
    if broken_off:
        return f'{line}, "broken_off": "{broken_off}"'
    if sampling is not None:
        has_failed = status != "0" if method == "gRPC" else int(status) >= 400
        if not sampling.is_always(int(milliseconds), has_failed=has_failed):
            return f'{line}, "sample": {sampling.share:g}'
    return line


def _cut(text: str) -> str:
    """The beginning and the end of a long text; the end of a traceback names the exception."""
    half = _MAX_TEXT // 2
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:half]} … {len(text) - 2 * half} characters are left out … {text[-half:]}"


def _clean(text: str) -> str:
    return escaped(text, keep="\t")
