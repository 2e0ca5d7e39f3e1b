"""How the workers of a version spend their time. All but `session` and `py_spy` is pure.

session    has one worker profiled while it serves; keeps the last profiles
py_spy     the program that samples Python from outside
analysis   the process that reads traces, so that the server does not
trace      a trace in Chrome's format to spans
breakdown  clocks and spans to parts of the time
ranks      communication, computing and idling of the ranks of a group
flame      stacks, and pictures of them
report     a page of one or several profiles
"""
