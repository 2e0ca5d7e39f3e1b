"""Writes the commented `config.properties` and the documentation's page from the table."""

from __future__ import annotations

from textwrap import wrap

from marserve.settings.table import SECTIONS, Key

_WIDTH = 100


def write_config() -> str:
    """The root `config.properties`: every key with its sentence; set where it has an example, else commented out."""
    lines = [
        "# Settings of marserve, in the format of TorchServe's config.properties. Written by",
        "# `python -m marserve.settings config`; docs/settings.md has the same as a table.",
        "#",
        "# Lines that begin with #key= show the default of `torchserve`, and that of `marserve` where it differs.",
        "# $$NAME$$ in a value stands for the environment variable NAME.",
    ]
    for section, keys in SECTIONS.items():
        lines += ["", f"# ---- {section} {'-' * (_WIDTH - len(section) - 8)}"]
        for key in keys:
            lines += [
                "",
                *(f"# {line}" for line in wrap(_sentence(key), _WIDTH - 2, break_on_hyphens=False)),
                *_setting(key),
            ]
    return "\n".join(lines) + "\n"


def write_page() -> str:
    """`docs/settings.md`: a table for each section."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `python -m marserve.settings docs`. -->",
        "",
        "Every key of `config.properties`. `torchserve …` and `marserve …` read the same keys with different defaults, "
        "and look for values in different orders:",
        "",
        "- `torchserve`: the file is `TS_CONFIG_FILE`, else `--ts-config`, else `config.properties` in the working "
        "directory. The command line takes precedence over the file. `TS_…` variables take precedence over both, if "
        "the file says `enable_envvars_config=true`.",
        "- `marserve`: a flag takes precedence over `MARSERVE_<KEY>`, and that over the file (`--ts-config`, else "
        "`MARSERVE_CONFIG_FILE`, else `TS_CONFIG_FILE`, else `config.properties`). Every key has such a variable, and "
        "`marserve start --set KEY=VALUE` sets any key.",
        "- Keys without a mark in the column *TorchServe* are marserve's own; `MARSERVE_<KEY>` sets them under both.",
        "- `MARSERVE_DEFAULTS_FILE` names a file in the same format with the lowest precedence; "
        "[images](deploy/docker.md) have one. With it `MARSERVE_<KEY>` sets TorchServe's keys under `torchserve` too, "
        "if neither file nor flag does.",
        "- `LOG_LOCATION`, `TEMP`, `TS_OPEN_INFERENCE_PROTOCOL` and `TS_MODEL_SERVER_HOME` are always read.",
        "",
        "`$$NAME$$` in a file's value stands for the environment variable NAME. An unknown key is reported with the "
        "nearest known one. A value that asks for a missing feature stops the start with a sentence; a value that "
        "changes nothing is accepted and logged once. The tables say which.",
    ]
    for section, keys in SECTIONS.items():
        lines += [
            "",
            f"## {section}",
            "",
            "| key | value | `torchserve` | `marserve` | TorchServe | meaning |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += map(_row, keys)
    return "\n".join(lines) + "\n"


def _sentence(key: Key) -> str:
    value = _value(key)
    sentence = f"{key.sentence} {value[0].upper()}{value[1:]}."
    ours, theirs = key.kind.write(key.defaults["marserve"]), key.kind.write(key.defaults["torchserve"])
    if ours != theirs:
        sentence += f" Default of marserve: {ours or 'none'}."
    if key.refuses:
        sentence += f" Any other value {key.refuses}."
    if key.accepts:
        sentence += f" Accepted: {key.accepts}."
    return sentence


def _setting(key: Key) -> list[str]:
    default = f"#{key.name}={key.kind.write(key.defaults['torchserve'])}"
    return [default] if key.example is None else [f"{key.name}={key.example}"]


def _value(key: Key) -> str:
    if key.choices:
        return f"one of {', '.join(key.choices)}"
    value = key.kind.name
    if key.minimum is not None and key.maximum is not None:
        value += f" from {key.minimum:g} to {key.maximum:g}"
    elif key.minimum is not None:
        value += f" of {key.minimum:g} or more"
    return f"{value}, in {key.unit}" if key.unit else value


def _row(key: Key) -> str:
    defaults = (key.kind.write(key.defaults[entry]) for entry in ("torchserve", "marserve"))
    theirs, ours = (f"`{default}`" if default else "–" for default in defaults)
    env = key.ts_env or key.always_env
    mark = f"`{env}`" if env else "yes" if key.is_torchserves else ""
    meaning = key.sentence
    if key.refuses:
        meaning += f" **Refused:** any other value {key.refuses}."
    if key.accepts:
        meaning += f" *Accepted:* {key.accepts}."
    cells = (f"`{key.name}`", _value(key), theirs, ours, mark, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
