"""Which models there are: their versions, their archives, and which version answers a request.

models      `Registry`: the calls that surfaces make
changes/    how versions come, change and go
intake/     from the word of a registration to a plan of a version
catalogue/  what is registered, and what it says of itself
observing/  shadows that copy requests, and counts of what became of them
"""
