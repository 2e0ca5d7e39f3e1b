"""One declared tensor: from what a request holds to a checked array with a batch axis, and what a model gave back.

Raises BadInput, with the tensor's name, for a value that does not fit.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from marserve_handlers.declared.bodies import Body, read_json
from marserve_handlers.declared.declaration import Tensor
from marserve_handlers.errors import BadInput
from marserve_handlers.support.shown import shown

NPY_MAGIC: Final = b"\x93NUMPY"
NPY_TYPE: Final = "application/x-npy"
MAX_NPY_HEADER: Final = 10_000

Array = NDArray[Any]

# Which kinds of arrays a dtype takes without loss of meaning, by the letters of numpy.
TAKES: Final = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}


class Slot:
    """A declared tensor, prepared for arrays: its dtype, its rank, its fixed sizes."""

    __slots__ = (
        "_exact",
        "_fixed",
        "_numbers",
        "_takes",
        "dtype",
        "name",
        "names",
        "rank",
        "tensor",
        "whole_words",
        "words",
    )

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        # numpy has no bfloat16: such numbers travel as float32, and only torch has the type itself.
        self.dtype = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
        self.rank = len(tensor.shape)
        self._fixed = [(axis, size) for axis, size in enumerate(tensor.shape) if isinstance(size, int)]
        self._exact = tuple(tensor.shape[1:]) if not tensor.names else None
        self.names = [(axis, size) for axis, size in enumerate(tensor.shape) if axis and isinstance(size, str)]
        self._takes = TAKES[self.dtype.kind]
        self._numbers = (int, float) if self.dtype.kind == "f" else (int,)
        self.words = f"{tensor.dtype} {_brackets(tensor.item_shape)}"
        self.whole_words = f"{tensor.dtype} {_brackets(tensor.shape)}"

    def read(self, value: Any) -> tuple[Array, bool]:
        """The array of decoded JSON or `.npy`, and whether it came with a batch axis; it always has one here."""
        array = value if isinstance(value, np.ndarray) else self._array(value)
        kind = array.dtype.kind
        if kind not in self._takes and array.size:
            raise BadInput(f"expected {self.words}, got {_dtype_words(array)} {_brackets(array.shape)}", self.name)
        dims = array.ndim
        is_batch = dims == self.rank
        if is_batch:
            fits = array.shape[1:] == self._exact if self._exact is not None else self._fits(array.shape)
        elif dims == self.rank - 1:
            fits = array.shape == self._exact if self._exact is not None else self._fits((1, *array.shape))
        else:
            fits = False
        if not fits:
            words = self.whole_words if is_batch else self.words
            raise BadInput(f"expected {words}, got {_brackets(array.shape)}", self.name)
        if array.dtype != self.dtype:
            array = self._cast(array)
        return array if is_batch else array[None], is_batch

    def _array(self, value: Any) -> Array:
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError, TypeError):
            raise BadInput(f"expected {self.words}, got lists of unequal lengths", self.name) from None
        kind = array.dtype.kind
        if kind in self._takes:
            return array
        if kind in "fO" and self.dtype.kind != "b" and array.size and not _has_odd(value, self._numbers):
            return self._of_large(value)
        if kind not in "biuf":
            if not array.size:
                return np.empty(array.shape, self.dtype)
            raise BadInput(f"expected {self.words}, got {_odd(value)}", self.name)
        return array

    def _of_large(self, value: Any) -> Array:
        """The array of numbers of which one has more than 64 bits, or 64 beside negative ones. Raises BadInput."""
        if self.dtype.kind != "f":  # numpy 1 takes them modulo 2 ** 64
            info, numbers = np.iinfo(self.dtype), np.asarray(value, object)
            if numbers.min() < info.min or numbers.max() > info.max:
                raise self._outside()
            return numbers.astype(self.dtype)
        try:
            return np.asarray(value, np.float64)
        except OverflowError:
            raise self._outside() from None

    def _outside(self) -> BadInput:
        if self.dtype.kind == "f":
            return BadInput(f"expected {self.words}, got a number that is too large", self.name)
        info = np.iinfo(self.dtype)
        return BadInput(f"expected {self.words}, got a number outside of {info.min} to {info.max}", self.name)

    def _cast(self, array: Array) -> Array:
        """The array in the declared dtype. Raises BadInput for a whole number that it cannot hold."""
        if self.dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
            info = np.iinfo(self.dtype)
            if array.min() < info.min or array.max() > info.max:
                raise self._outside()
        with np.errstate(over="ignore"):
            return array.astype(self.dtype)

    def _fits(self, shape: Sequence[int]) -> bool:
        return all(shape[axis] == size for axis, size in self._fixed)

    def takes_item(self, shape: Sequence[int]) -> bool:
        """Whether this is the shape of one item."""
        return len(shape) == self.rank - 1 and self._fits((1, *shape))

    def read_bytes(self, body: Body) -> tuple[Array, bool]:
        """As `read`, of a body that is `.npy` or JSON."""
        return self.read(self.read_npy(body) if body.startswith(NPY_MAGIC) else read_json(body))

    def read_npy(self, body: Body) -> Array:
        """The array of a `.npy` file, over its own bytes. No pickles, and no more memory than the body has."""
        file = io.BytesIO(body)
        try:
            version = npy.read_magic(file)
            if version == (1, 0):
                shape, is_fortran, dtype = npy.read_array_header_1_0(file, max_header_size=MAX_NPY_HEADER)
            elif version == (2, 0):
                shape, is_fortran, dtype = npy.read_array_header_2_0(file, max_header_size=MAX_NPY_HEADER)
            else:
                raise ValueError(f"version {version}")
            if dtype.hasobject or dtype.kind not in "biuf":
                raise BadInput(f"expected {self.words}, got .npy of {dtype}", self.name)
            count = 1
            for size in shape:
                count *= size
            left = len(body) - file.tell()
            if count * dtype.itemsize != left:
                raise BadInput(
                    f"expected {self.words}, got .npy of {left} bytes, and its shape {_brackets(shape)} needs "
                    f"{count * dtype.itemsize}",
                    self.name,
                )
            array = np.frombuffer(body, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
        except BadInput:
            raise
        except Exception as error:  # what a header of arbitrary bytes makes of numpy's parser
            raise BadInput(
                f"expected {self.words}, got .npy that cannot be read: {shown(str(error))}", self.name
            ) from None
        return array.astype(dtype.newbyteorder("=")) if not dtype.isnative else array

    # ------------------------------------------------------------------------------------------- what a model gave

    def check_output(self, value: Any, rows: int) -> Array:
        """The array of an output that `predict` returned for `rows` rows. Raises TypeError or ValueError."""
        array = as_array(value)
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(
                f"predict returned {self.name} of shape {_brackets(array.shape)} for {rows} rows: its first dimension "
                f"must be {rows}"
            )
        if array.ndim != self.rank or not self._fits(array.shape):
            raise ValueError(
                f"predict returned {self.name} of shape {_brackets(array.shape)}, and {_brackets(self.tensor.shape)} "
                "is declared"
            )
        if array.dtype != self.dtype:
            if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                raise TypeError(f"predict returned {self.name} of {array.dtype}, and {self.tensor.dtype} is declared")
            array = array.astype(self.dtype)
        return array


def as_array(value: Any) -> Array:
    """A numpy array, or a torch tensor as one: on the CPU, bfloat16 as float32."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    return np.asarray(value)


def as_npy(array: Array) -> bytes:
    """The bytes of a `.npy` file."""
    file = io.BytesIO()
    npy.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _dtype_words(array: Array) -> str:
    return "numbers with a fraction," if array.dtype.kind == "f" else str(array.dtype)


def _odd(value: Any) -> str:
    """What of a JSON value is no number: the first such element."""
    while isinstance(value, list) and value:
        value = next((each for each in value if _has_odd(each, (int, float))), value[0])
    return "an object" if isinstance(value, dict) else "null" if value is None else shown(value)


def _has_odd(value: Any, numbers: tuple[type, ...]) -> bool:
    """Whether a JSON value is, or has among its elements, something else than these numbers."""
    if isinstance(value, list):
        return any(_has_odd(each, numbers) for each in value)
    return not isinstance(value, numbers)


def _brackets(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"
