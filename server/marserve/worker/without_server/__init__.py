"""A handler without a server.

declare     what a handler declares, for `marserve archive`
compared    an archive's model under comparison, for `marserve compare`
in_process  a handler under test, for `marserve_handlers.testing`
"""
