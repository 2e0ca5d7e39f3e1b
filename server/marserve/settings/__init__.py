"""Every key of `config.properties`, declared once, and how its value is found.

`table.py` declares the keys as the fields of `Settings`; `load.py` finds the values in file, flags and environment;
`rules.py` refuses what cannot be; `document.py` writes the commented file and the page of the documentation from the
table (`python -m marserve.settings`). Knows no server: reads one file, looks whether folders exist, starts nothing.
"""

from marserve.settings.load import load_settings
from marserve.settings.report import sources_report, startup_report
from marserve.settings.table import KEYS, Entry, Key, Origin, Settings
from marserve.settings.values import Address, ModelDefaults, ModelToLoad

__all__ = [
    "KEYS",
    "Address",
    "Entry",
    "Key",
    "ModelDefaults",
    "ModelToLoad",
    "Origin",
    "Settings",
    "load_settings",
    "sources_report",
    "startup_report",
]
