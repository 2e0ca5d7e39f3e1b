"""The survey of one folder: findings about every piece, and about all pieces together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from marserve.migration.findings import Finding, Spot, in_order
from marserve.migration.judges.archive_findings import judge_archive, judge_model_folder
from marserve.migration.judges.deployment_findings import judge_deployment
from marserve.migration.judges.package_findings import judge_packages
from marserve.migration.judges.script_findings import FOLDERS, Starts, judge_lines
from marserve.migration.judges.settings_findings import StartTrial, judge_settings, judge_start
from marserve.migration.judges.snapshot_findings import judge_snapshots
from marserve.migration.layout import Layout, find_layout, follow_volumes
from marserve.migration.overview import Overview, read_overview
from marserve.migration.volumes import judge_volumes, read_volumes

MAX_BYTES = 1_000_000
ReadCommand = Callable[[Sequence[str]], dict[str, object]]
"""The settings, by key, of the words of a `torchserve` command; raises ValueError if they are no such command."""


def survey(
    root: Path,
    *,
    flags: Collection[str],
    read_command: ReadCommand,
    environment: Mapping[str, str],
    try_start: StartTrial,
) -> list[Finding]:
    """Survey a TorchServe installation's folder, without running or changing anything.

    `flags` are the flags of `torchserve` here. `try_start` tries a start with the settings that were read, without
    workers. Raises NotADirectoryError if there is no such folder.
    """
    layout = find_layout(root)
    layout = follow_volumes(layout, read_volumes(layout))
    overview = read_overview(layout)
    findings: list[Finding] = []
    for file in layout.configs:
        findings += judge_settings(file, layout, overview, environment, try_start)
    for file in layout.archives:
        findings += judge_archive(file, layout.shown(file), overview, layout)
    for folder in layout.model_folders:
        findings += judge_model_folder(folder, layout.shown(folder), overview)

    def try_command(words: list[str], spot: Spot) -> Iterator[Finding]:
        faulty = {each.file for each in findings if each.verdict == "action"}
        yield from _try_command(words, spot, layout, read_command, environment, try_start, faulty)

    def judge_texts(files: Iterable[Path], judge: Callable[[str, str], Iterator[Finding]]) -> None:
        for file in files:
            findings.extend(_judge_text(file, layout.shown(file), judge))

    starts = Starts(flags, try_command)
    judge_texts(layout.scripts, lambda text, shown: judge_lines(text, Spot(shown), layout, overview, starts))
    judge_texts(layout.deployments, lambda text, shown: judge_deployment(text, shown, layout, overview, starts))
    judge_texts(layout.package_lists, judge_packages)
    findings += judge_snapshots(layout)
    findings += judge_volumes(layout)
    findings += _judge_rest(layout, overview)
    if not layout.configs and layout.has_archives and not any(each.verdict == "action" for each in findings):
        findings += judge_start({"load_models": "all"}, environment, layout, Spot("."), try_start)
    return in_order(dict.fromkeys(findings))


def _judge_text(file: Path, shown: str, judge: Callable[[str, str], Iterator[Finding]]) -> Iterator[Finding]:
    """What `judge` finds in a file's text, which it gets with the file's name; empty for a file over MAX_BYTES."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return
        text = file.read_text("utf-8", "replace")
    except OSError as error:
        yield Spot(shown).action(f"it cannot be read: {error.strerror}", "look at it yourself")
        return
    yield from judge(text, shown)


def _try_command(
    words: Sequence[str],
    spot: Spot,
    layout: Layout,
    read_command: ReadCommand,
    environment: Mapping[str, str],
    try_start: StartTrial,
    faulty: Collection[str],
) -> Iterator[Finding]:
    """Findings of a trial with a command's settings and the folders here; empty if its settings file is faulty."""
    try:
        given = read_command(words)
    except ValueError:
        return
    for name in (*FOLDERS, "ts_config"):
        find = layout.find_file if name == "ts_config" else layout.find_folder
        named = str(given.get(name) or "")
        if layout.docker_volume(named) is not None:
            return  # the folders are in a volume that was not looked into
        found = find(named) if named else None
        if found is not None:
            given[name] = str(found)
        elif name in FOLDERS:
            given.pop(name, None)  # the script makes it, or it was reported as missing before
    file = Path(str(given.get("ts_config") or layout.root / "config.properties"))
    if layout.shown(file) not in faulty:
        yield from judge_start(given, environment, layout, spot, try_start)


def _judge_rest(layout: Layout, overview: Overview) -> Iterator[Finding]:
    for file in layout.key_files:
        if overview.has_tokens:
            yield Spot(layout.shown(file)).differs(
                "its keys are TorchServe's; new ones are made at each start, and the file is removed at the end"
            )
    for file in layout.log_configs:
        spot = Spot(layout.shown(file))
        yield spot.differs("is not read; see log_level, log_format, log_location and metrics_location")
    if layout.cut_short:
        yield Spot(".").action("there are more files than were looked at", "survey its parts one by one")
    if not (layout.configs or layout.has_archives or layout.scripts or layout.volumes):
        yield Spot(".").action(
            "nothing of a TorchServe installation was found: no settings, archives or start scripts",
            "name the folder that holds config.properties or the model store",
        )
