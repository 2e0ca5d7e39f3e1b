"""Imports FastAPI without preparing its models of OpenAPI. `api/rest/__init__.py` imports this before anything else.

FastAPI declares some forty models when it is imported, and pydantic prepares each for validating and writing. That
takes a fifteenth of a server's start, and only an API description uses the models. So while FastAPI is imported,
`defer_build` has pydantic prepare a model at its first use.
"""

from __future__ import annotations

from pydantic import BaseModel

_own = BaseModel.model_config
BaseModel.model_config = {**_own, "defer_build": True}
try:
    import fastapi as fastapi
finally:
    BaseModel.model_config = _own
