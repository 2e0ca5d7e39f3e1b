"""Commands that need no server.

archive  make a model archive
fetch    bring archives into a folder
version  versions of this program and its runtimes
"""
