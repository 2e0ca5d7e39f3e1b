"""Imports FastAPI without preparing its models of OpenAPI. `api/rest/__init__.py` imports this before anything else.

FastAPI declares some forty models when it is imported, and pydantic prepares each for validating and writing. That is
a fifteenth of a server's start, and the models are used only where an API description is written. Until FastAPI is
imported pydantic is told to prepare a model when it is first used (`defer_build`).
"""

from __future__ import annotations

from pydantic import BaseModel

_own = BaseModel.model_config
BaseModel.model_config = {**_own, "defer_build": True}
try:
    import fastapi as fastapi
finally:
    BaseModel.model_config = _own
