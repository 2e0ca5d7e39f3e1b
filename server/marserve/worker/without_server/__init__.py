"""A handler without a server.

declare     what a handler declares, for `marserve archive`
traced      a trace beside its class, for `marserve archive --traced-from`
compared    an archive's model under comparison, for `marserve compare`
in_process  a handler under test, for `marserve_handlers.testing`
"""
