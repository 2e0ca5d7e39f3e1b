"""What the server answers as JSON, each document typed once; imports nothing of marserve.

management     models, workers, workflows, downloads, watches, dry runs, errors
profiles       a profile of a version
optimising     the search for a faster build of a version
pages          what `GET /` says of the server, and `/docs` of its models
"""
