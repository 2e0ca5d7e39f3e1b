"""Which models there are: their versions, their archives, and which version answers a request.

models      `Registry`: the calls that manage models
model_calls what handlers ask of other models
data_plane  a request's way in: which version answers it
changes/    registers, changes and removes versions
intake/     from a registration to the plan of a version
catalogue/  the table of models and versions, and describe
observing/  shadows that copy requests, and counts of requests
"""
