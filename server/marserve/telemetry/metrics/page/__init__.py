"""The metrics page: which families are on it, what they mean, and how they are written.

catalogue   what each of marserve's families means: type, labels, unit, when it moves
families    a family, whose numbers are read when the page is written
writer      text of families, in pieces, of which unchanged ones are kept
views       a version as the page shows it; totals that outlive versions
versions    the families of versions
torchserve  TorchServe's families
registry    the same families as a registry of prometheus_client
foreign     collectors of plug-ins and of the library, in threads of their own
reference   `docs/metrics-reference.md`, written by `python -m marserve.telemetry.metrics.page.reference`
"""
