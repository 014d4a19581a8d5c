"""Writing files that are whole or not there, and files of large arrays that are read in place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

_DTYPES = {
    "F64": np.dtype("<f8"), "I64": np.dtype("<i8"), "U64": np.dtype("<u8"), "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "I16": np.dtype("<i2"), "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
_BLOCK = 1 << 24  # bytes copied at a time
_DIGEST = "sha256"
# A digest over gigabytes would take the seconds that mapping them saves: of a large file, pieces alone are covered.
_WHOLE, _PIECES, _PIECE = 1 << 26, 256, 1 << 14


def write_atomic(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, in folders made as needed, then put it in `path`'s place in one step.

    A writer that is killed leaves at most a hidden file, which a later writer of the same `path` on that computer
    removes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    computer = f"{zlib.crc32(platform.node().encode()):08x}"
    _remove_orphans(path, computer)
    partial = path.with_name(f".{path.name}.{computer}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_orphans(path: Path, computer: str) -> None:
    """Remove what writers of `path` left that were killed on this computer."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{computer}\.(\d+)\.[0-9a-f]{{8}}")
    for entry in os.scandir(path.parent):
        match = pattern.fullmatch(entry.name)
        if match and not _is_running(int(match[1])):
            Path(entry.path).unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    if os.name != "posix":  # elsewhere a signal 0 is no mere question
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def write_arrays(path: str | os.PathLike, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays and texts to one file in the safetensors layout, atomically, holding no copy of an array.

    The layout is a little-endian 64-bit length, a JSON header of that length, and the arrays' bytes one after another,
    those of the larger item sizes first so that all are aligned. The header's metadata also get a digest, which covers
    the header and the arrays: all their bytes up to 64 MiB, 256 evenly spread pieces of 16 KiB in a larger file.

    Args:
        path: the file.
        arrays: by name; bool, integers, float32 or float64.
        metadata: further texts by name.

    Raises:
        TypeError: an array of another dtype.
    """
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, expected one of {', '.join(map(str, _NAMES))}")
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, dict] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}

    def write(partial: Path) -> None:
        with partial.open("w+b") as file:
            begin = _write_header(file, header, "0" * 64)
            for _, array in ordered:
                for block in byte_blocks(array):
                    file.write(block)
            digest = _digest(header, file, begin, end)
            file.seek(0)
            _write_header(file, header, digest)

    write_atomic(path, write)


def read_arrays(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays, mapped from the file and read-only, and texts that `write_arrays` wrote.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is not one of them, incomplete or damaged (as far as the digest covers it).
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 8 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"its {size} bytes do not begin with the length of a header")
            header = _parse_header(file.read(length))
            digest = header["__metadata__"].pop(_DIGEST)
            begin = 8 + length
            places = _places(header, begin, size - begin)
            if _digest(header, file, begin, size - begin) != digest:
                raise ValueError("its digest is that of another content")
            raw = np.asarray(np.memmap(file, np.uint8, "r"))
    except (KeyError, TypeError, AttributeError, RecursionError):  # a header of another form
        raise ValueError(f"{path} is not a file of arrays: its header has another form") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a file of arrays, or damaged: {error}") from None
    arrays = {name: raw[rows].view(dtype).reshape(shape) for name, (rows, dtype, shape) in places.items()}
    return arrays, header["__metadata__"]


def _places(header: Mapping[str, dict], begin: int, size: int) -> dict[str, tuple[slice, np.dtype, list[int]]]:
    """Bytes, dtype and shape of each array of a file whose arrays take `size` bytes from `begin` on."""
    places, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, stop)):
            raise ValueError(f"array {name!r} has a shape or an offset that is not a whole number")
        aligned = (begin + first) % dtype.itemsize == 0
        if first != end or stop - first != math.prod(shape) * dtype.itemsize or not aligned:
            raise ValueError(f"array {name!r} does not lie where it should")
        if stop > size:
            raise ValueError(f"array {name!r} ends at byte {stop} of {size}")
        places[name] = slice(begin + first, begin + stop), dtype, shape
        end = stop
    if end != size:
        raise ValueError(f"{size - end} bytes follow the last array")
    return places


def byte_blocks(array: np.ndarray) -> Iterator[memoryview]:
    """The array's bytes in C order, in blocks of some MiB, without a copy where they lie that way."""
    rows = np.atleast_1d(array)
    step = max(1, _BLOCK * len(rows) // max(1, rows.nbytes))
    for begin in range(0, len(rows) if rows.size else 0, step):
        yield np.ascontiguousarray(rows[begin : begin + step]).reshape(-1).view(np.uint8).data


def _write_header(file: BinaryIO, header: Mapping[str, dict], digest: str) -> int:
    """Write length and header, padded so that the arrays are aligned; returns where they begin."""
    text = json.dumps(header | {"__metadata__": header["__metadata__"] | {_DIGEST: digest}}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"the header takes {len(text)} bytes, expected at most {_LARGEST_HEADER}")
    return file.write(len(text).to_bytes(8, "little")) + file.write(text)


def _parse_header(text: bytes) -> dict[str, dict]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header is no JSON") from None


def _digest(header: Mapping[str, dict], file: BinaryIO, begin: int, size: int) -> str:
    """SHA-256 of the header without the digest itself, and of the `size` bytes from `begin` on or pieces of them."""
    digest = hashlib.sha256(json.dumps(header).encode())
    if size <= _WHOLE:
        pieces = [(begin, size)]
    else:  # read, not mapped: a map would keep much more than the pieces in memory
        pieces = [(begin + k * (size - _PIECE) // (_PIECES - 1), _PIECE) for k in range(_PIECES)]
    for place, length in pieces:
        file.seek(place)
        digest.update(file.read(length))
    return digest.hexdigest()
