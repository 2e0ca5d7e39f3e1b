"""From a picture's bytes to numbers: the same numbers as torchvision's, and clear words for what is no picture.

The stored values are torchvision 0.28.0's, of `Resize`, `CenterCrop`, `ToTensor` and `Normalize` on the Pillow image
that `draw_picture` gives (bilinear, antialiased: their defaults), printed with six digits. On 50 pictures of other
sizes the two agreed in every bit.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import pytest

from support.pictures import draw_picture, encode_picture

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from marserve_handlers.errors import BadPicture  # noqa: E402
from marserve_handlers.support.pictures import PictureTransform, convert_mode, cut_centre, open_picture  # noqa: E402

# (height, width), mean of each channel, and the channels at five points.
POINTS = [(0, 0), (1, 7), (57, 101), (112, 111), (223, 223)]
STORED = [
    (
        (300, 400),
        (0.070462, 0.195161, 0.417915),
        [
            (-0.936296, 1.763305, -0.60183),
            (0.70768, 1.5007, -1.020131),
            (-1.587037, -1.160364, 0.217342),
            (0.604932, 0.205182, 1.803399),
            (-0.730799, 0.345238, 0.862222),
        ],
    ),
    (
        (480, 333),
        (0.069894, 0.199223, 0.415884),
        [
            (-0.388304, -0.057423, 1.036514),
            (0.810429, 1.640756, 1.385098),
            (1.324172, -1.545518, -0.898126),
            (1.170049, -1.212885, 1.297952),
            (-0.371179, -1.037815, 0.165055),
        ],
    ),
    (
        (100, 50),
        (0.069189, 0.41425, 0.261235),
        [
            (0.108314, -0.565126, 0.635643),
            (0.38231, -0.512605, 0.565926),
            (1.803665, 1.763305, 1.925403),
            (0.570682, -1.82563, 0.130196),
            (-1.878157, 0.240196, 1.751111),
        ],
    ),
    (
        (511, 300),
        (0.068741, 0.197479, 0.418334),
        [
            (0.74193, 1.238095, -0.82841),
            (-0.730799, -1.65056, 0.391634),
            (1.307047, 1.045518, 0.548497),
            (0.330936, -0.635154, -0.078954),
            (0.604932, 0.782913, 0.234771),
        ],
    ),
    (
        (257, 1000),
        (0.067959, 0.193707, 0.410025),
        [
            (0.604932, 0.327731, 1.890545),
            (-1.912407, -0.897759, 1.55939),
            (1.444045, 1.028011, -1.002702),
            (-0.199932, -1.843137, 2.134553),
            (0.41656, -0.022409, -1.368715),
        ],
    ),
]

# Grey: (height, width), resize, mean, and the values at five points, for a cut of 50 by 36, mean 0.3 and std 0.4. The
# first is smaller than the cut in both directions, by odd numbers.
GREY_POINTS = [(0, 0), (15, 2), (20, 10), (25, 18), (34, 32)]
GREY_STORED = [
    ((20, 31), None, -0.313862, (-0.75, -0.75, 0.465686, -0.75, 1.720588)),
    ((61, 40), None, 0.506187, (0.161765, -0.240196, 1.151961, 0.102941, 0.357843)),
    ((61, 40), [30, 45], 0.001155, (-0.75, 1.014706, 0.465686, 0.053922, 1.397059)),
    ((61, 40), 50, 0.507582, (0.995098, 0.220588, 1.338235, 0.004902, -0.308824)),
]


@pytest.mark.parametrize(("sides", "means", "values"), STORED, ids=lambda value: str(value)[:12])
def test_the_default_transform_gives_torchvisions_numbers(sides: Any, means: Any, values: Any) -> None:
    """Resize 256, cut 224, to numbers, ImageNet's normalisation."""
    numbers = PictureTransform().to_array(draw_picture(*sides))

    assert numbers.shape == (3, 224, 224)
    assert numbers.dtype == np.float32
    assert numbers.mean((1, 2)) == pytest.approx(means, abs=2e-5)
    for (y, x), expected in zip(POINTS, values, strict=True):
        assert numbers[:, y, x] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("sides", "resize", "mean", "values"), GREY_STORED)
def test_a_configured_transform_gives_torchvisions_numbers(sides: Any, resize: Any, mean: Any, values: Any) -> None:
    """Grey, with and without resizing, cut and filled up."""
    section = {"mode": "L", "size": [50, 36], "resize": resize, "mean": 0.3, "std": 0.4}
    numbers = PictureTransform.from_config(section).to_array(draw_picture(*sides, "L"))

    assert numbers.shape == (1, 50, 36)
    assert numbers.mean() == pytest.approx(mean, abs=3e-5)  # 2.3e-5 off with Pillow 10
    assert [numbers[0, y, x] for y, x in GREY_POINTS] == pytest.approx(values, abs=1e-6)


def test_filling_a_place_gives_the_same_numbers() -> None:
    """`fill` writes what `to_array` gives."""
    image = draw_picture(300, 280)
    place = np.zeros((3, 224, 224), dtype=np.float32)
    PictureTransform().fill(image, place)

    assert np.array_equal(place, PictureTransform().to_array(image))


def test_the_numbers_are_exact_where_they_can_be() -> None:
    """White is exactly (1 - mean) / std in float32: values are divided by 255, not multiplied by its inverse."""
    white = Image.new("L", (8, 8), 255)
    section = {"mode": "L", "size": 8, "scale": 0.00392156862745098, "mean": 0.3053, "std": 0.3762}

    numbers = PictureTransform.from_config(section).to_array(white)

    assert set(numbers.ravel()) == {(np.float32(1) - np.float32(0.3053)) / np.float32(0.3762)}


def test_a_scale_of_ones_own_is_taken() -> None:
    """`scale: 1` leaves 0 to 255; 1/16 gives 0 to 16."""
    image = Image.new("L", (4, 4), 160)

    assert PictureTransform.from_config({"mode": "L", "size": 4, "scale": 1}).to_array(image).max() == 160
    assert PictureTransform.from_config({"mode": "L", "size": 4, "scale": 0.0625}).to_array(image).max() == 10


@pytest.mark.parametrize(
    ("sides", "size", "fitted"),
    [
        ((28, 28), [8, 8], (8, 8)),
        ((20, 60), [8, 8], (8, 24)),
        ((60, 20), [8, 8], (24, 8)),
        ((30, 40), [10, 40], (30, 40)),
        ((31, 40), [62, 20], (62, 80)),
    ],
)
def test_without_resize_the_picture_covers_the_size(sides: Any, size: Any, fitted: Any) -> None:
    """It is scaled, as little as covers `size`, before the centre is cut."""
    transform = PictureTransform.from_config({"size": size})

    assert transform._resized(*sides) == fitted
    assert transform.to_array(draw_picture(*sides)).shape == (3, *size)


def test_a_thin_picture_keeps_a_pixel() -> None:
    """The shorter side never vanishes, however long the other is."""
    assert PictureTransform(resize=1, size=(1, 1)).to_array(draw_picture(1, 900)).shape == (3, 1, 1)
    assert PictureTransform(resize=4, size=None)._resized(900, 2000) == (4, 8)


def test_cutting_rounds_half_a_pixel_to_the_even_offset() -> None:
    """An offset of 0.5 becomes 0, of 1.5 becomes 2."""
    row = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(1, 12))

    assert np.asarray(cut_centre(row, (1, 11)))[0, 0] == 0
    assert np.asarray(cut_centre(row, (1, 9)))[0, 0] == 2


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"mode": "CMYK"}, "mode"),
        ({"mode": ["L"]}, "mode"),
        ({"size": 0}, "size"),
        ({"size": [8]}, None),
        ({"size": [8, 8, 8]}, "size"),
        ({"size": "8"}, "size"),
        ({"size": [8.0, 8]}, "size"),
        ({"size": 1_000_000}, "size"),
        ({"resize": -1}, "resize"),
        ({"resize": [0, 4]}, "resize"),
        ({"scale": 0}, "scale"),
        ({"scale": "1/255"}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"mean": [0.1, 0.2]}, "mean"),
        ({"mean": "0.1"}, "mean"),
        ({"std": 0}, "std"),
        ({"std": [1, 1, 0]}, "std"),
        ({"std": [1, 1, True]}, "std"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(section: dict[str, Any], word: str | None) -> None:
    """The error names the key and the value."""
    if word is None:
        assert PictureTransform.from_config(section).size == (8, 8)
        return
    with pytest.raises(ValueError, match=rf"handler\.{word} of the model's configuration"):
        PictureTransform.from_config(section)


def test_grey_has_no_normalisation_of_its_own() -> None:
    """ImageNet's figures are for colour; without any a grey picture is 0 to 1."""
    transform = PictureTransform.from_config({"mode": "L", "size": 8})

    assert (transform.mean, transform.std, transform.channels) == ((0.0,), (1.0,), 1)


def test_an_empty_section_is_torchserves_transform() -> None:
    """256, 224, ImageNet."""
    assert PictureTransform.from_config({}) == PictureTransform()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_common_formats_are_pictures(format: str) -> None:
    """Whatever the request calls it, the bytes tell."""
    image = open_picture(encode_picture(draw_picture(32, 32), format))

    assert image.size == (32, 32)


def test_base64_text_is_a_picture() -> None:
    """Text is base64 of an image file."""
    text = base64.b64encode(encode_picture(draw_picture(9, 7))).decode()

    assert open_picture(text).size == (7, 9)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG that says it is that large and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BROKEN = {
    "empty": b"",
    "text": b"certainly no picture",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"></svg>',
    "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "truncated png": encode_picture(draw_picture(64, 64))[:500],
    "truncated jpeg": encode_picture(draw_picture(64, 64), "JPEG")[:400],
    "png signature alone": b"\x89PNG\r\n\x1a\n",
    "bomb": png_claiming(50_000, 50_000),
    "zip": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_picture_is_the_clients_error(name: str) -> None:
    """Code 400 and a sentence without paths; no decoder's exception gets through."""
    with pytest.raises(BadPicture) as caught:
        open_picture(BROKEN[name])

    assert caught.value.error_code == 400
    assert caught.value.message.endswith(".")
    assert "/" not in caught.value.message


def test_text_that_is_no_base64_is_the_clients_error() -> None:
    """Its own sentence."""
    with pytest.raises(BadPicture, match="no base64"):
        open_picture("abc")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
@pytest.mark.parametrize("wanted", ["L", "RGB"])
def test_pictures_of_any_mode_are_converted(mode: str, wanted: str) -> None:
    """The model gets its channels whatever the file holds."""
    image = Image.new("I;16", (4, 4), 0x8000) if mode == "I;16" else draw_picture(4, 4).convert(mode)

    converted = convert_mode(image, wanted)

    assert converted.mode == wanted
    assert converted.size == (4, 4)


def test_sixteen_bits_keep_their_upper_eight() -> None:
    """A deep picture is scaled, not cut off at 255."""
    deep = Image.fromarray(np.array([[0, 255, 256, 0x80FF, 0xFFFF]], dtype=np.uint16))
    buffer = io.BytesIO()
    deep.save(buffer, "PNG")

    assert np.asarray(convert_mode(open_picture(buffer.getvalue()), "L")).tolist() == [[0, 0, 1, 128, 255]]


def test_without_resize_and_size_the_picture_keeps_its_own() -> None:
    """Both false: what a detector wants."""
    transform = PictureTransform.from_config({"resize": False, "size": False, "mean": 0.0, "std": 1.0})

    assert transform.to_array(draw_picture(3, 5)).shape == (3, 3, 5)
    assert PictureTransform.from_config({"resize": 6, "size": False}).to_array(draw_picture(3, 5)).shape == (3, 6, 10)
