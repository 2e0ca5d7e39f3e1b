"""Assembly: settings in, a running server out. Nothing else builds objects.

server           a server's life: start, serve, end
building/        the parts, made of the settings
listeners        HTTP listeners: bound first, accepting once ready
grpc_ports       the gRPC ports
local_run        what `marserve run` adds: when the model is ready, and changes of its source
terminal_log     what its terminal is shown of the logs
look             reads what the machine has, at the start
early_probes     answers probes meanwhile
draining         how the server ends
hanging_calls    at the end, gives up calls that never return
last_resort      ends a process whose end hangs
preemption       notices that the machine is taken away
service_manager  tells systemd
places           the folders that a server writes
trial            tries a start without serving

It imports none of them: `marserve fetch` builds its fetcher by `building/stores` and needs no server.
"""
