# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint of DCP. Nothing of it is run or imported, nor torch."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ioshape._dcp.names import DESCRIPTION
from ioshape._errors import DamagedError, FormatError, StorageError, failure
from ioshape._load.reader import Reader
from ioshape._native import lib
from ioshape._save.report import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

# A description of a million tensors takes a tenth of that.
_MOST_BYTES = 1 << 31


def read_description(path: str, operation: str) -> bytes:
    """All of the file of that path."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        code = -(error.errno or errno.EIO)
        sentence = f'cannot read "{path}": {error.strerror}'
        raise failure(code, sentence, path, operation) from None
    if len(data) > _MOST_BYTES:
        raise no_description(path, operation, "it is too large")
    return data


def no_description(path: str, operation: str, why: str, remedy: str = "") -> StorageError:
    """The exception for a file that is none."""
    sentence = f'"{path}" is no description of a checkpoint: {why[:300]}'
    return failure(lib.IOSHAPE_E_FORMAT, sentence, path, operation, remedy=remedy)


def check_file_name(name: object) -> None:
    """Files lie in the checkpoint's directory or below."""
    if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
        raise pickle.UnpicklingError(f"it names {str(name)[:100]!r} as a file of its own")


# ---- Stand-ins ----------------------------------------------------------------------------------


class _StandIn:
    """For whatever the pickle names: keeps what it would have been made of."""

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        made.fields = {}
        return made

    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {"state": state}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Something inert."""
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        # Of a dtype the name is all there is to know.
        is_class = module != "torch" or name == "Size"
        return type(name, (_StandIn,), {}) if is_class else name


def _fields(value: Any) -> dict[str, Any]:
    return value.fields if isinstance(value, _StandIn) else {}


def _size(value: Any) -> tuple[int, ...]:
    """Of a torch.Size."""
    arguments = value.arguments if isinstance(value, _StandIn) else ()
    numbers = arguments[0] if arguments and isinstance(arguments[0], (tuple, list)) else ()
    return tuple(number for number in numbers if type(number) is int and number >> 63 == 0)


# ---- What is there ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one rank has saved of an item of the state dict."""

    #: the item: "model.layer.weight"
    name: str
    #: the data file, below the checkpoint
    file: str
    offset: int
    n_bytes: int
    #: went through an extension of DCP, which alone can read it
    is_transformed: bool


@dataclass(frozen=True)
class Item:
    """An item of the state dict."""

    name: str
    #: "" if it is no tensor
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def n_elements(self) -> int:
        """Of a tensor."""
        return math.prod(self.shape)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a checkpoint of DCP."""
    return os.path.isfile(os.path.join(path, DESCRIPTION))  # noqa: PTH113, PTH118


def items(path: str, operation: str = "inspect") -> list[Item]:
    """Of the checkpoint in a directory, by name.

    Raises:
        FormatError: its .metadata cannot be read.
        StorageError: it is not there.
    """
    name = os.path.join(path, DESCRIPTION)  # noqa: PTH118
    data = read_description(name, operation)
    try:
        return _items(_fields(_Unpickler(io.BytesIO(data)).load()))
    except MemoryError:
        raise
    except Exception as error:
        raise no_description(name, operation, str(error)) from None


def _items(described: dict[str, Any]) -> list[Item]:
    if "state_dict_metadata" not in described:
        raise pickle.UnpicklingError("it holds something else")
    parts: dict[str, list[Part]] = {}
    for index, info in (described.get("storage_data") or {}).items():
        name, told = str(_fields(index)["fqn"]), _fields(info)
        check_file_name(told["relative_path"])
        parts.setdefault(name, []).append(
            Part(
                name,
                told["relative_path"],
                int(told["offset"]),
                int(told["length"]),
                bool(told.get("transform_descriptors")),
            )
        )
    found = []
    for name, item in sorted(described["state_dict_metadata"].items()):
        told = _fields(item)
        state = _fields(told.get("properties")).get("state") or ("",)
        shape = _size(told.get("size"))
        found.append(Item(name, str(state[0]), shape, tuple(parts.get(name, ()))))
    return found


def verify(
    path: str, *, share: float = 1.0, progress: Callable[[Progress], object] | None = None
) -> int:
    """Reads what a checkpoint holds, and compares all checksums; its bytes.

    Raises:
        DamagedError: one is wrong; the message names the tensor.
        StorageError: something is missing, or could not be read.
    """
    parts = [part for item in items(path, "verify") for part in item.parts]
    parts.sort(key=lambda part: (part.file, part.offset))
    total, done = sum(part.n_bytes for part in parts), 0
    for part in parts:
        _verify(path, part, share)
        done += part.n_bytes
        if progress is not None:
            progress(Progress("read", done, total))
    return total


def _verify(path: str, part: Part, share: float) -> None:
    name = os.path.join(path, part.file)  # noqa: PTH118
    try:
        with Reader(name, part=(part.offset, part.n_bytes), operation="verify") as reader:
            reader.verify(share)
    except FormatError:
        if not part.is_transformed:
            raise
    except DamagedError as error:
        sentence = f"{error.sentence}, which holds '{part.name}'"
        raise DamagedError(error.facts._replace(sentence=sentence)) from None
