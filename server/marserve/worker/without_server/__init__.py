"""A handler without a server.

declare     what a handler declares, for `marserve archive`
in_process  a handler under test, for `marserve_handlers.testing`
"""
