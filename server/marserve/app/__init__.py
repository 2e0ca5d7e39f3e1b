"""Assembly: settings in, a running server out. Nothing else builds objects.

server           a server's life: start, serve, end
building/        the parts, made of the settings
listeners        HTTP listeners: bound first, accepting once ready
grpc_ports       the gRPC ports
look             the look at the machine that a start begins with
early_probes     answers probes during that
draining         how the server ends
hanging_calls    gives up calls that never return, at the end
last_resort      ends a process whose end hangs
preemption       notices that the machine is taken away
service_manager  tells systemd
places           the folders that a server writes
trial            a start tried, with nothing served
"""

from marserve.app.building.cannot_start import CannotStart
from marserve.app.server import run

__all__ = ["CannotStart", "run"]
