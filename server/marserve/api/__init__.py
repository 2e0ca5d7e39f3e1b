"""What clients speak to. Each surface turns its encoding into the same calls, and holds no rule of its own.

http/        connections: bytes to a request, an answer to bytes, limits
rest/        the APIs over HTTP beside inference
grpc/        the same calls over gRPC
open_inference/  what the Open Inference Protocol says of server and models
errors       which status an error has over HTTP
tokens       the keys, and which a request needs
browsers     which requests of browsers are refused
preflights   what a browser asks before it sends
sockets      binds the address of a listener
port_holder  which process has a port
tls          certificates of listeners
certificate_expiry  when certificates end
request_ids  ids of requests
wishes       the deadline, priority and version that a client asks for
parameters   reads the parameters of management calls
byte_ledger  how many bytes of requests and answers are held at a time
decoding     threads for bodies that take long to decode
come_back    the `Retry-After` of a refusal
"""
