"""A package of native code that leaves a file where it is loaded, whoever loads it and however that ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

# Runs at dlopen, before anything of the library is called.
SOURCE = """
#include <cstdio>
__attribute__((constructor)) static void leave() {{ if (FILE *file = fopen("{path}", "w")) fclose(file); }}
"""
MEMBERS = "{stem}/data/aotinductor/model"


def canary_package(path: Path, canary: Path) -> bytes:
    """Write the package to `path` and return its bytes: it makes the file `canary`, and is no model otherwise."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    source, library = path.with_name("canary.cpp"), path.with_name("canary.wrapper.so")
    source.write_text(SOURCE.format(path=canary))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)  # found above
    folder = MEMBERS.format(stem=path.stem)
    with zipfile.ZipFile(path, "w") as package:
        package.writestr(f"{path.stem}/archive_format", "pt2")
        package.writestr(f"{path.stem}/archive_version", "0")
        package.writestr(f"{path.stem}/byteorder", "little")
        package.write(library, f"{folder}/canary.wrapper.so")
        package.writestr(f"{folder}/canary.wrapper_metadata.json", json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
    source.unlink()
    library.unlink()
    return path.read_bytes()
