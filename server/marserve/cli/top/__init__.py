"""`marserve top`: what a server does now, in a terminal.

command   the command: one table, or the live view with its requests to the server
view      what is shown, and what a key does; pure
terminal  the alternate screen, keys as they are pressed, and the terminal as it was before
"""
