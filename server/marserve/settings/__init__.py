"""Every key of `config.properties`, declared once, and how its value is found.

    table            declares the keys, as the fields of `Settings`
    values           the kinds of values: reads and writes them
    load             finds the values in file, flags and environment
    rules            refuses settings that contradict each other
    document         writes the commented file and the page of the documentation
    report           the lines that the server log begins with
    snapshot_files   snapshots as files of settings
    stores           the setting `stores`: options of object stores
    watches          the settings `watches` and `event_secrets`
    interpreters     the setting `allowed_interpreters`: what workers may run under
    vertex           settings from Vertex AI's variables
    open_management  keeps unprotected management on this machine
    shown_address    addresses without parts that may be a key

It reads one file, looks whether folders exist, and starts nothing.
`python -m marserve.settings` prints the file or the page.
"""

from marserve.settings.load import load_settings
from marserve.settings.report import sources_report, startup_report
from marserve.settings.table import KEYS, Entry, Key, Origin, Settings, apis_by_address
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
    "apis_by_address",
    "load_settings",
    "sources_report",
    "startup_report",
]
