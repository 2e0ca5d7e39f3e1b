"""Every key of `config.properties`, declared once, and how its value is found.

    table            declares the keys, as the fields of `Settings`
    values           what values settings can have
    load             finds the values in file, flags and environment
    rules            refuses what cannot be
    document         writes the commented file and the page of the documentation
    report           the lines that the server log begins with
    snapshot_files   snapshots as files of settings
    stores           what `stores` says of object stores
    watches          what `watches` and `event_secrets` say
    vertex           what Vertex AI's variables say
    open_management  keeps unprotected management on this machine
    shown_address    addresses without what may be a key

Knows no server: reads one file, looks whether folders exist, starts nothing.
`python -m marserve.settings` prints the file or the page.
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
