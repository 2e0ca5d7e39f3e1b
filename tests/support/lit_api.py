"""A stand-in for LitServe's `LitAPI`, with what its documentation promises; and its package, for files to import."""

from __future__ import annotations

from pathlib import Path

TEXT = '''
import json


class LitAPI:
    """The base of LitServe's models."""

    def __init__(self, max_batch_size=1, batch_timeout=0.0, stream=False, spec=None, enable_async=False):
        self.max_batch_size, self.batch_timeout, self.stream = max_batch_size, batch_timeout, stream
        self.spec, self.enable_async = spec, enable_async

    def setup(self, device): ...

    def decode_request(self, request): return request

    def batch(self, inputs): return inputs

    def unbatch(self, output): return map(list, output) if self.stream else list(output)

    def encode_response(self, output): return output

    def format_encoded_response(self, data): return json.dumps(data) + "\\n" if isinstance(data, dict) else data

    def pre_setup(self): self.is_prepared = True


LitAPI.__module__ = "litserve.api"


class LitServer:
    """Never made: a worker does not run a file as a program."""
'''

_names: dict[str, type] = {}
exec(TEXT, _names)  # the same class in this process
LitAPI = _names["LitAPI"]


def write_litserve(folder: Path) -> None:
    """Put the package into a folder, as `litserve`."""
    package = folder / "litserve"
    package.mkdir()
    (package / "__init__.py").write_text(TEXT)
