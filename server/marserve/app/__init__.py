"""Assembly: settings in, a running server out. Nothing else builds objects.

`run(settings)` is a server's whole life: logs, machine, parts, listeners; then it waits for SIGTERM or SIGINT, drains
and ends. `server.py` is that life, `draining.py` its end. What it consists of is made in `parts.py`, with `models.py`
(what loads and runs models), `snapshots.py`, `metrics.py` and `access.py` (keys and TLS); `routes.py` says which
surface answers on a listener, `listeners.py` and `grpc_ports.py` bind them. `from_settings.py` turns settings into the
options that the parts ask for.
"""

from marserve.app.cannot_start import CannotStart
from marserve.app.server import run

__all__ = ["CannotStart", "run"]
