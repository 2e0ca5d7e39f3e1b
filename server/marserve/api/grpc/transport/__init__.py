"""gRPC on the wire: HTTP/2 by the library h2, and on it calls with messages and statuses. It knows no services.

port        takes connections in, sweeps them, ends them
connection  one client: h2, windows, keepalive, age, what a flood is answered with
stream      one call, as services see it; a `Method` says how a service answers
framing     bytes of a call as messages, compressed ones too (pure)
header_blocks  headers of answers for the wire (pure)
head        a call's header and trailers (pure)
slices      what came, a few frames a turn of the loop (pure)
floods      who floods a connection (pure)
limits      what clients may do
status      the statuses of calls
"""
