"""The whole survey of one folder: every piece judged, and what only the pieces together can tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from marserve.migration.archive_findings import judge_archive, judge_model_folder
from marserve.migration.deployment_findings import judge_deployment
from marserve.migration.findings import Finding, in_order
from marserve.migration.layout import Layout, find_layout
from marserve.migration.overview import Overview, read_overview
from marserve.migration.package_findings import judge_packages
from marserve.migration.script_findings import judge_script
from marserve.migration.settings_findings import judge_settings
from marserve.migration.snapshot_findings import judge_snapshots


def survey(root: Path, *, flags: Collection[str], environment: Mapping[str, str]) -> list[Finding]:
    """Look at a TorchServe installation's folder; nothing of it is run or changed.

    `flags` are the flags of `torchserve` here. Raises NotADirectoryError where there is no such folder.
    """
    layout = find_layout(root)
    overview = read_overview(layout)
    findings: list[Finding] = []
    for file in layout.configs:
        findings += judge_settings(file, layout, overview, environment)
    for file in layout.archives:
        findings += judge_archive(file, layout.shown(file), overview, layout)
    for folder in layout.model_folders:
        findings += judge_model_folder(folder, layout.shown(folder), overview)
    for file in layout.scripts:
        findings += judge_script(file, layout, overview, flags)
    for file in layout.deployments:
        findings += judge_deployment(file, layout, overview, flags)
    for file in layout.package_lists:
        findings += judge_packages(file, layout.shown(file))
    findings += judge_snapshots(layout)
    findings += _judge_rest(layout, overview)
    return in_order(dict.fromkeys(findings))


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
    if not layout.configs and not layout.has_archives and not layout.scripts:
        yield Finding(
            *(
                "action",
                ".",
                0,
                "nothing of a TorchServe installation was found: no settings, archives or start scripts",
            ),
            "name the folder that holds config.properties or the model store",
        )
