"""From the bytes of a picture to the numbers a vision model takes, with Pillow and numpy alone.

Resize, crop and normalise give the numbers that torchvision's transforms give for Pillow images: the same filter of the
same library, the same rounding of sides and offsets, the same float32 operations in the same order.
Knows no model and no request.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from marserve_handlers.errors import BadPicture

# What is taken for a picture, by its first bytes. Pillow can open more, some of it (EPS) by starting other programs.
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\x00\x00\x01\x00", "ICO"),
    *((b"P%d" % number, "PPM") for number in range(1, 7)),
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

MAX_SIDE = 16_384
"""The largest side, in pixels, that a model's configuration may ask for."""

_CHANNELS = {"L": 1, "RGB": 3}
_DEEP_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")

FloatArray = NDArray[np.float32]


def open_picture(value: bytes | bytearray | str) -> Image.Image:
    """The decoded picture of a request's value: an image file's bytes, or text that is base64 of them.

    Of an animation it is the first frame. Raises BadPicture for anything that is no complete picture of a known
    format, and for one with more pixels than Pillow allows (`limit_max_image_pixels`).
    """
    if isinstance(value, str):
        value = _from_base64(value)
    if not value:
        raise BadPicture("The request holds no picture: its body is empty.")
    try:
        image = Image.open(io.BytesIO(value), formats=(_format_of(value),))
        image.load()
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise BadPicture("The picture has too many pixels.") from error
    except Exception as error:  # Pillow's decoders raise what they stumble over: OSError, SyntaxError, struct.error …
        raise BadPicture(
            "The request's body is no picture that can be read: send a complete PNG, JPEG, WebP, GIF, BMP or TIFF."
        ) from error
    return image


def _format_of(value: bytes | bytearray) -> str:
    """Pillow's name of the format that the bytes begin like. Raises ValueError for no format that is taken."""
    for signature, name in _SIGNATURES:
        if value.startswith(signature):
            return name
    if value[:4] == b"RIFF" and value[8:12] == b"WEBP":
        return "WEBP"
    if value[4:8] == b"ftyp" and value[8:12] in (b"avif", b"avis", b"mif1", b"miaf"):
        return "AVIF"
    raise ValueError("no known signature")


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """The picture in `mode`, `L` or `RGB`; pictures of 16 bits a channel keep their upper 8."""
    if image.mode in _DEEP_MODES:
        deep = np.asarray(image, dtype=np.int64)
        image = Image.fromarray(np.clip(deep >> 8, 0, 255).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


@dataclass(frozen=True)
class PictureTransform:
    """Resize, crop at the centre, scale, normalise: picture in, float32 [C, H, W] out.

    `resize`: the shorter side in pixels, or (height, width), or None for none; with `is_covering` it is instead what
    `size` needs, the picture scaled until it covers it. `size`: (height, width) cut from the centre, filled up with
    zeros where the picture is smaller, or None for none. Values 0 to 255 are multiplied by `scale`, then `mean` is
    subtracted and the rest divided by `std`, one number a channel.
    """

    mode: str = "RGB"
    resize: int | tuple[int, int] | None = 256
    size: tuple[int, int] | None = (224, 224)
    scale: float = 1 / 255
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    is_covering: bool = False
    _divisor: np.float32 = field(init=False, repr=False, compare=False)
    _mean: FloatArray = field(init=False, repr=False, compare=False)
    _std: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # 1/255 is not exact: dividing by 255 gives the last bit that ToTensor gives.
        divisor = 1 / self.scale
        nearest = round(divisor)
        is_whole = nearest != 0 and math.isclose(divisor, nearest, rel_tol=1e-6)
        object.__setattr__(self, "_divisor", np.float32(nearest if is_whole else divisor))
        object.__setattr__(self, "_mean", np.asarray(self.mean, dtype=np.float32).reshape(-1, 1, 1))
        object.__setattr__(self, "_std", np.asarray(self.std, dtype=np.float32).reshape(-1, 1, 1))

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> PictureTransform:
        """The transform that `handler` of a model's configuration asks for; TorchServe's where it says nothing.

        `mode` (`L` or `RGB`), `resize` (shorter side, [height, width], or false), `size` (side or [height, width] of
        what the model takes, or false), `scale`, `mean`, `std` (a number, or one a channel). With `size` alone the
        picture is scaled to cover `size`. `L` has no mean and std unless they are given. Raises ValueError, naming
        the key, for a value that cannot be used.
        """
        mode = section.get("mode", "RGB")
        if not isinstance(mode, str) or mode not in _CHANNELS:
            raise ValueError(f"handler.mode of the model's configuration is {mode!r}; it must be L or RGB.")
        channels = _CHANNELS[mode]
        size: tuple[int, int] | None = (224, 224)
        if "size" in section:
            size = None if section["size"] is False else _sides("size", section["size"])
        is_covering = size is not None and "size" in section and "resize" not in section
        scale = section.get("scale", 1 / 255)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not scale > 0 or math.isinf(scale):
            raise ValueError(f"handler.scale of the model's configuration is {scale!r}; it must be a number above 0.")
        std = _per_channel("std", section.get("std", IMAGENET_STD if mode == "RGB" else 1.0), channels)
        if 0 in std:
            raise ValueError("handler.std of the model's configuration holds a 0, which cannot be divided by.")
        return cls(
            mode=mode,
            resize=None if is_covering else _resize(section.get("resize", 256)),
            size=size,
            scale=float(scale),
            mean=_per_channel("mean", section.get("mean", IMAGENET_MEAN if mode == "RGB" else 0.0), channels),
            std=std,
            is_covering=is_covering,
        )

    @property
    def channels(self) -> int:
        """How many channels come out."""
        return _CHANNELS[self.mode]

    def fit(self, image: Image.Image) -> Image.Image:
        """The picture in the transform's mode, resized and cut, before any arithmetic."""
        image = convert_mode(image, self.mode)
        width, height = image.size
        sides = self._resized(height, width)
        if sides != (height, width):
            image = image.resize((sides[1], sides[0]), Image.Resampling.BILINEAR)
        return image if self.size is None else cut_centre(image, self.size)

    def fill(self, image: Image.Image, out: FloatArray) -> None:
        """Write the picture's numbers into `out`, float32 [C, H, W] of the size that `fit` gives."""
        self._normalise(np.asarray(self.fit(image)), out)

    def to_array(self, image: Image.Image) -> FloatArray:
        """The picture as float32 [C, H, W]."""
        pixels = np.asarray(self.fit(image))
        out = np.empty((self.channels, *pixels.shape[:2]), dtype=np.float32)
        self._normalise(pixels, out)
        return out

    def __call__(self, image: Image.Image) -> Any:
        """The picture as a torch tensor [C, H, W], for handlers that call `image_processing` themselves."""
        from marserve_handlers.runtimes.tensors import as_tensor

        return as_tensor(self.to_array(image), "cpu")

    def _normalise(self, pixels: NDArray[np.uint8], out: FloatArray) -> None:
        """Pixels [H, W] or [H, W, C] to numbers [C, H, W], each step rounded to float32 as torch does."""
        out[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        out /= self._divisor
        out -= self._mean
        out /= self._std

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The sides after resizing. The longer one is cut to a whole number, not rounded, as torchvision does."""
        if self.is_covering and self.size is not None:
            wanted_height, wanted_width = self.size
            if wanted_height * width >= wanted_width * height:
                return wanted_height, max(wanted_width, int(wanted_height * width / height))
            return max(wanted_height, int(wanted_width * height / width)), wanted_width
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        if width <= height:
            return max(1, int(self.resize * height / width)), self.resize
        return self.resize, max(1, int(self.resize * width / height))


def cut_centre(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """(height, width) from the picture's centre, filled up with zeros where it is smaller.

    An odd pixel goes to the far side when filling up; when cutting, half a pixel rounds to the even offset.
    """
    wanted_height, wanted_width = size
    width, height = image.size
    if wanted_width > width or wanted_height > height:
        left = max(0, (wanted_width - width) // 2)
        top = max(0, (wanted_height - height) // 2)
        padded = Image.new(image.mode, (max(width, wanted_width), max(height, wanted_height)))
        padded.paste(image, (left, top))
        image = padded
        width, height = image.size
    if (height, width) == size:
        return image
    top = round((height - wanted_height) / 2.0)
    left = round((width - wanted_width) / 2.0)
    return image.crop((left, top, left + wanted_width, top + wanted_height))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise BadPicture("The request's text is no base64 of a picture.") from error


def _resize(value: Any) -> int | tuple[int, int] | None:
    if value is None or value is False or value == 0:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return _sides("resize", value)[0]
    return _sides("resize", value)


def _sides(key: str, value: Any) -> tuple[int, int]:
    """(height, width) of one whole number or of two."""
    sides = value if isinstance(value, (list, tuple)) else [value]
    if len(sides) == 1:
        sides = [sides[0], sides[0]]
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides):
        raise ValueError(
            f"handler.{key} of the model's configuration is {value!r}; it must be a whole number from 1 to {MAX_SIDE}, "
            "or [height, width] of such."
        )
    return sides[0], sides[1]


def _per_channel(key: str, value: Any, channels: int) -> tuple[float, ...]:
    numbers: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    if len(numbers) == 1:
        numbers = list(numbers) * channels
    if len(numbers) != channels or not all(
        isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        for number in numbers
    ):
        raise ValueError(
            f"handler.{key} of the model's configuration is {value!r}; it must be a number, or one for each of the "
            f"{channels} channels."
        )
    return tuple(float(number) for number in numbers)
