"""The survey of one folder: findings about every piece, and about all pieces together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from marserve.migration.findings import Finding, in_order
from marserve.migration.judges.archive_findings import judge_archive, judge_model_folder
from marserve.migration.judges.deployment_findings import judge_deployment
from marserve.migration.judges.package_findings import judge_packages
from marserve.migration.judges.script_findings import FOLDERS, Starts, judge_script
from marserve.migration.judges.settings_findings import StartTrial, judge_settings, judge_start
from marserve.migration.judges.snapshot_findings import judge_snapshots
from marserve.migration.layout import Layout, find_layout, follow_volumes
from marserve.migration.overview import Overview, read_overview
from marserve.migration.volumes import judge_volumes, read_volumes

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

    def try_command(words: list[str], shown: str, line: int) -> Iterator[Finding]:
        faulty = {each.file for each in findings if each.verdict == "action"}
        yield from _try_command(words, shown, line, layout, read_command, environment, try_start, faulty)

    starts = Starts(flags, try_command)
    for file in layout.scripts:
        findings += judge_script(file, layout, overview, starts)
    for file in layout.deployments:
        findings += judge_deployment(file, layout, overview, starts)
    for file in layout.package_lists:
        findings += judge_packages(file, layout.shown(file))
    findings += judge_snapshots(layout)
    findings += judge_volumes(layout)
    findings += _judge_rest(layout, overview)
    if not layout.configs and layout.has_archives and not any(each.verdict == "action" for each in findings):
        findings += judge_start({"load_models": "all"}, environment, layout, ".", 0, try_start)
    return in_order(dict.fromkeys(findings))


def _try_command(
    words: Sequence[str],
    shown: str,
    line: int,
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
        yield from judge_start(given, environment, layout, shown, line, try_start)


def _judge_rest(layout: Layout, overview: Overview) -> Iterator[Finding]:
    for file in layout.key_files:
        if overview.has_tokens:
            said = "its keys are TorchServe's; new ones are made at each start, and the file is removed at the end"
            yield Finding("differs", layout.shown(file), 0, said)
    for file in layout.log_configs:
        said = "is not read; see log_level, log_format, log_location and metrics_location"
        yield Finding("differs", layout.shown(file), 0, said)
    if layout.cut_short:
        yield Finding("action", ".", 0, "there are more files than were looked at", "survey its parts one by one")
    if not (layout.configs or layout.has_archives or layout.scripts or layout.volumes):
        yield Finding(
            *(
                "action",
                ".",
                0,
                "nothing of a TorchServe installation was found: no settings, archives or start scripts",
            ),
            "name the folder that holds config.properties or the model store",
        )
