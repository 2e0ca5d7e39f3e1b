"""The APIs over HTTP, beside inference itself.

application  a listener's FastAPI application, made of routers
models/      models, traffic, roll-outs, desired state, workflows, events, downloads
platforms/   health, metrics, KServe, Open Inference, SageMaker, plug-ins
pages/       `GET /`, `/openapi.json`, and the page at `/docs`
no_route     what is there, for a request that has no route
logs         the logs, asked for and followed; their levels
requests     single requests that are recorded, and why they were slow
guard        checks keys, and applies the rules for browsers
only_here    refuses callers of other machines
hang_up      cancels work for a client that hung up
library      imports FastAPI
late_routes  routes that are analysed at their first request
short_body   reads bodies of a few words
schemas      the shapes of answers
head_requests  answers HEAD as GET
description  the OpenAPI document
declared_paths  its paths for models that declare their input
"""

from marserve.api.rest import library as library  # before a file of this room imports FastAPI otherwise
