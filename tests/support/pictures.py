"""Pictures for tests, drawn by a formula, so that stored values need no stored picture."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def draw_picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A picture whose three channels differ everywhere; `L` is the red one."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    red = (x * 7 + y * 13 + (x * y) // 11) % 256
    green = (x * x // 5 + y * 3) % 256
    blue = 255 - (x * 2 + y * y // 7) % 256
    pixels = np.stack([red, green, blue], -1).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else np.ascontiguousarray(pixels[..., 0]))


def encode_picture(image: Image.Image, format: str = "PNG") -> bytes:
    """The bytes of the picture's file."""
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()
