"""TorchServe's name for `KServev2Envelope`."""

from marserve_handlers.envelopes.kserve_v2 import (
    KServev2Envelope,
    _DatatypeToNumpy,
    _NumpyToDatatype,
    _to_datatype,
    _to_dtype,
)

__all__ = ["KServev2Envelope", "_DatatypeToNumpy", "_NumpyToDatatype", "_to_datatype", "_to_dtype"]
