"""The report of one or several profiles as an HTML page. Pure.

The page has no script and asks for nothing else; names, which come from models and their code, are text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from marserve.answers.profiles import ModelProfile, PartName, ProfileOperator, ProfilePart, ProfileRank
from marserve.profiling.flame import draw

# What each part is, for people, and the colour of its bar.
PARTS: Final[Mapping[PartName, tuple[str, str]]] = {
    "operators": ("operators of torch", "#4269d0"),
    "python": ("Python, and libraries other than torch", "#efb118"),
    "waiting": ("ready to run, but other threads had the processor", "#ff725c"),
    "blocked": ("blocked: asleep, on a lock, on a file or the network", "#9498a0"),
    "collections": ("garbage collections", "#a463f2"),
    "decode": ("decode: requests made rows", "#6cc5b0"),
    "encode": ("encode: answers made bytes", "#3ca951"),
    "between": ("between batches: no work for this worker", "#c9ced6"),
}
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5a6472; --line: #d0d7de; --ground: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #9aa4b2; --line: #3a424d; --ground: #14181d; } }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 2rem auto; max-width: 70rem; padding: 0 1rem; overflow-wrap: anywhere;
}
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; background: #fff; border-radius: 4px; }
svg.bar { height: 2rem; }
svg.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .4rem 0 0; vertical-align: -1px; }
code { font: 13px ui-monospace, monospace; }
.dim { color: var(--dim); }
"""


def write_report(profiles: Sequence[tuple[str, ModelProfile]]) -> str:
    """The page; each profile comes with the address of its server, empty if there is one alone."""
    names = ", ".join(dict.fromkeys(f"{each.modelName} {each.modelVersion}" for _, each in profiles))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>Profile of {escape(names)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Profile of {escape(names)}</h1>",
            *([_servers(profiles)] if len(profiles) > 1 else []),
            *(_one(address, profile) for address, profile in profiles),
            "</body></html>",
            "",
        ]
    )


def got_of(profile: ModelProfile) -> str:
    """How many requests it got, in words."""
    asked = f" of the {profile.askedRequests} asked for" if profile.askedRequests else ""
    return (
        f"{profile.requests}{asked} requests in {profile.batches} batches, {profile.ms / 1000:.1f} s, {profile.worker}"
    )


def _servers(profiles: Sequence[tuple[str, ModelProfile]]) -> str:
    """How much the servers differ: a row a server, a column a part."""
    rows = [
        [address, str(profile.requests), *(f"{each.share:.1%}" for each in profile.parts)]
        for address, profile in profiles
    ]
    return "<h2>The servers beside each other</h2>" + _table(["server", "requests", *PARTS], rows, numbers=1)


def _one(address: str, profile: ModelProfile) -> str:
    pieces = [f"<h2>{escape(address)}</h2>"] if address else []
    pieces += [f"<p>{escape(got_of(profile))}, {escape(profile.began)}</p>", _bar(profile.parts)]
    pieces.append(
        _table(
            ["part", "ms", "share"],
            [[PARTS[each.name][0], f"{each.ms:.1f}", f"{each.share:.1%}"] for each in profile.parts],
            numbers=1,
            keys=[PARTS[each.name][1] for each in profile.parts],
        )
    )
    pieces += [f'<p class="dim">{escape(remark)}</p>' for remark in profile.remarks or ()]
    pieces.append("<h3>Operators</h3>")
    if profile.operators:
        pieces.append(f"<p>Recorded in {profile.recordedBatches} of {profile.batches} batches.</p>")
        pieces.append(_operators(profile.operators))
    if profile.noOperators:
        pieces.append(f"<p>None were recorded: {escape(profile.noOperators)}.</p>")
    if profile.operatorStacks:
        pieces.append(draw(profile.operatorStacks, "operators, by the time they took", "ms"))
    pieces.append("<h3>Python</h3>")
    if profile.pythonStacks:
        pieces.append(draw(profile.pythonStacks, "Python, by samples of py-spy", "samples"))
    else:
        pieces.append(f"<p>No samples: {escape(profile.noPython or 'the worker was idle')}.</p>")
    if profile.ranks:
        pieces += ["<h3>Ranks</h3>", _ranks(profile.ranks)]
    if profile.workers:
        rows = [[each.name, str(each.requests), f"{each.meanMs:.1f}"] for each in profile.workers]
        pieces += ["<h3>Workers</h3>", _table(["worker", "requests meanwhile", "ms a batch, of late"], rows, numbers=1)]
    return "\n".join(pieces)


def _bar(parts: Sequence[ProfilePart]) -> str:
    left, drawn = 0.0, []
    for part in parts:
        words = f"{PARTS[part.name][0]}: {part.share:.1%}"
        drawn.append(
            f'<rect x="{left:.3f}" y="0" width="{part.share * 100:.3f}" height="10" fill="{PARTS[part.name][1]}">'
            f"<title>{escape(words)}</title></rect>"
        )
        left += part.share * 100
    inside = "".join(drawn)
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img">{inside}</svg>'


def _operators(operators: Sequence[ProfileOperator]) -> str:
    rows = []
    for each in operators:
        shapes = "; ".join(f"{shape.shapes} ({shape.calls} calls, {shape.ms:.1f} ms)" for shape in each.shapes)
        rows.append([each.name, str(each.calls), f"{each.selfMs:.2f}", f"{each.totalMs:.2f}", shapes])
    return _table(["operator", "calls", "own ms", "with what it called, ms", "shapes"], rows, numbers=1, texts=(4,))


def _ranks(ranks: Sequence[ProfileRank]) -> str:
    rows = [
        [
            str(each.rank),
            f"{each.communicationMs:.1f}",
            f"{each.computeMs:.1f}",
            f"{each.overlapMs:.1f}",
            f"{each.idleMs:.1f}",
            ", ".join(f"{name} {count}" for name, count in each.collectives.items()),
        ]
        for each in ranks
    ]
    columns = ["rank", "communication, ms", "computing, ms", "both at once, ms", "idle, ms", "collectives"]
    return _table(columns, rows, numbers=1, texts=(5,))


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: int,
    texts: Sequence[int] = (),
    keys: Sequence[str] = (),
) -> str:
    """A table whose columns from `numbers` on are numbers, but for `texts`; `keys` are colours before the rows."""

    def cell(kind: str, at: int, text: str, key: str = "") -> str:
        right = ' class="n"' if at >= numbers and at not in texts else ""
        mark = f'<svg class="key" viewBox="0 0 1 1"><rect width="1" height="1" fill="{key}"/></svg>' if key else ""
        return f"<{kind}{right}>{mark}{escape(text)}</{kind}>"

    head = "".join(cell("th", at, name) for at, name in enumerate(columns))
    body = "".join(
        "<tr>"
        + "".join(cell("td", at, text, keys[index] if keys and not at else "") for at, text in enumerate(row))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
