"""The cache of built markets: opened where the same files were built with the same options before."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fox_env import market as market_module
from fox_env.contracts import Contract
from fox_env.data.features import Feature
from fox_env.files import read_arrays, write_arrays
from fox_env.market import Market

SCHEMA = 1
"""Version of the key. That of the files is `fox_env.market.SCHEMA`."""

ENDING = ".fxcache"
_LONGEST_STEM = 40


def open_or_build(
    folder: str | os.PathLike,
    *,
    files: Sequence[str | os.PathLike],
    options: Mapping[str, object],
    build: Callable[[], Market],
    order_flow: bool,
) -> Market:
    """The market that `build` makes of `files` and `options`, mapped from the cache, built first if it is not there.

    A cached market is recognised by the path, size and modification time of every file, by the options and by the
    sources of the code that builds markets. Where several processes want the same one, one builds and the others wait.
    A cache file that is damaged or of another key is built anew.

    Args:
        folder: where the cache lies; made if it is not there.
        files: every file that `build` reads.
        options: everything else that the market depends on: values that JSON can hold, paths and `Contract`.
        build: reads the files and builds the market.
        order_flow: whether the market must have features of the order flow.

    Returns:
        The market, its arrays mapped from the cache and read-only.

    Raises:
        FileNotFoundError: one of `files` is not there.
        ValueError: an option that the cache cannot recognise, such as a `Feature` of the user's own; a file that
            changes while the market is built; or a market without order flow where it is asked for.
    """
    files = [Path(file).resolve() for file in files]
    key = cache_key(files, options, order_flow)
    path = Path(folder) / f"{files[0].name.partition('.')[0][:_LONGEST_STEM]}-{key[:16]}{ENDING}"
    market = _open(path, key, order_flow)
    if market is not None:
        return market

    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):  # let go by the system if its holder is killed
        market = _open(path, key, order_flow)  # another process may have built it meanwhile
        if market is None:
            built = build()
            if order_flow and not built.has_order_flow:
                raise ValueError(f"the market of {files[0]} has no order flow, which was asked for")
            if cache_key(files, options, order_flow) != key:
                raise ValueError(f"{files[0]} or another file of the market changed while it was read, read it again")
            arrays, texts = built.to_arrays()
            write_arrays(path, arrays, texts | {"key": key})
            market = _open(path, key, order_flow)
            if market is None:
                raise ValueError(f"{path} was written and cannot be read back")
    return market


def cache_key(files: Sequence[Path], options: Mapping[str, object], order_flow: bool) -> str:
    """64 hexadecimal digits that name a market.

    Raises:
        FileNotFoundError: one of `files` is not there.
        ValueError: an option that the cache cannot recognise.
    """
    stats = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in ((file, file.stat()) for file in files)]
    content = {
        "schema": [SCHEMA, market_module.SCHEMA], "fox": _builder(), "files": stats, "options": dict(options),
        "order_flow": order_flow,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, Contract):
        return asdict(value)
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, Feature):
        raise ValueError(
            f"feature {value.name!r} is a Feature, which the cache cannot recognise again, expected a name"
        )
    raise ValueError(f"option {value!r} is of type {type(value).__name__}, which the cache cannot recognise again")


@functools.cache
def _builder() -> list[str | None]:
    """Fox's version, and the digest of the modules that build markets: between releases the version stands still."""
    try:
        version = importlib.metadata.version("fox-es")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = None
    package = Path(market_module.__file__).parent
    digest = hashlib.sha256()
    for source in (*sorted((package / "data").glob("*.py")), package / "market.py", package / "contracts.py"):
        digest.update(source.read_bytes())
    return [version, digest.hexdigest()]


def _open(path: Path, key: str, order_flow: bool) -> Market | None:
    """The market in that file, if it is whole and of that key."""
    try:
        arrays, texts = read_arrays(path)
        market = Market.from_arrays(arrays, texts) if texts.get("key") == key else None
    except (FileNotFoundError, ValueError):
        return None
    return market if market is not None and (market.has_order_flow or not order_flow) else None
