"""A handler without a server.

declare     what a handler declares, for `marserve archive`
debugged    one request to an archive's model on the caller's terminal, for `marserve debug`
traced      a trace beside its class, for `marserve archive --traced-from`
compared    an archive's model under comparison, for `marserve compare`
conformance  whether a program speaks the wire as a worker must
in_process  a handler under test, for `marserve_handlers.testing`
"""
