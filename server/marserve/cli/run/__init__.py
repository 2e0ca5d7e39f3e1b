"""`marserve run`: serves a model from a file, in this terminal.

command        the command, and the settings of its server
source         the model's source, staged, and again when it has changed
screen         what the terminal shows
"""
