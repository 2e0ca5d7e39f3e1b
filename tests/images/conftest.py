"""The image that tests look into and run."""

from __future__ import annotations

import pytest

import marserve
from support.images import BASE, build, has_image, make_base

IMAGE = "localhost/marserve-test:cpu"


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cpu image, built from these sources."""
    if not has_image(BASE):
        make_base(tmp_path_factory.mktemp("base"))
    build("cpu", IMAGE, "--build-arg", f"VERSION={marserve.__version__}", "--build-arg", "REVISION=0123abc")
    return IMAGE
