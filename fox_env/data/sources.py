"""Which files there are, what they hold, and what the bars are made of."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from fox_env.data import dbn, tabular
from fox_env.data.dbn import DbnFile
from fox_env.data.rolls import outright

_DBN_ENDINGS = (".dbn", ".dbz", ".frag")
_PRICED = tuple(dict.fromkeys((*dbn.BAR_SCHEMAS, *dbn.TRADE_SCHEMAS)))
_ENDINGS = ".dbn, .dbn.zst, .csv, .txt, .tsv, .json or .parquet"


def find_files(path: str | Path, symbol: str) -> tuple[list[Path], str]:
    """The files of a path and their kind, ``"dbn"`` or ``"table"``.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: no file of a known kind, or files of both kinds.
    """
    place = Path(path)
    if place.is_dir():
        root = symbol_root(symbol)
        inner = [place / name for name in dict.fromkeys((symbol, f"{root}.FUT", root)) if (place / name).is_dir()]
        place = inner[0] if inner else place
        # A name that begins with a dot is a file that is being written.
        shown = (file for file in place.iterdir() if file.is_file() and not file.name.startswith("."))
        found = sorted(file for file in shown if _kind(file))
        if not found:
            raise ValueError(f"{place} holds no file with market data: {_ENDINGS}")
    elif place.exists():
        found = [place]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())
        if not found:
            raise FileNotFoundError(f"{path} does not exist")
    if any(_kind(file) == "dbn" for file in found):
        found = [file for file in found if file.suffix.lower() != ".json"]  # what Databento puts beside a download
    kinds: dict[str, Path] = {}
    for file in found:
        kind = _kind(file)
        if kind is None:
            raise ValueError(f"{file} is of an unknown kind, expected {_ENDINGS}")
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        raise ValueError(f"{kinds['dbn']} and {kinds['table']} are of different kinds, expected DBN or tables alone")
    return found, next(iter(kinds))


def find_dbn(path: str | Path, symbol: str, name: str) -> list[Path]:
    """The DBN files of a path.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: files of another kind.
    """
    files, kind = find_files(path, symbol)
    if kind != "dbn":
        raise ValueError(f"{name} {path} holds tables, expected DBN")
    return files


def _kind(file: Path) -> str | None:
    endings = [ending.lower() for ending in file.suffixes]
    if any(ending in _DBN_ENDINGS for ending in endings):
        return "dbn"
    return "table" if tabular.is_table(file) else None


def open_all(paths: Sequence[Path], quality: dict[str, int | str]) -> list[DbnFile]:
    """Files that hold records of a known schema, in the order of their first.

    Raises:
        ValueError: there are none.
    """
    files = [dbn.open_file(path) for path in paths]
    known = [file for file in files if file.schema is None or file.schema in dbn.SCHEMAS]
    where = dbn.where(paths)
    if not known:
        held = ", ".join(sorted({str(file.schema) for file in files}))
        raise ValueError(f"{where} holds {held}, expected one of {', '.join(dbn.SCHEMAS)}")
    useful = [file for file in known if file.kinds]
    dbn.add_counts(
        quality, "files", {"without_records": len(known) - len(useful), "other_schemas": len(files) - len(known)}
    )
    if not useful:
        raise ValueError(f"{where} holds no records, only a header")
    return sorted(useful, key=lambda file: file.first)


def distinct(files: Iterable[DbnFile]) -> list[DbnFile]:
    """Each file once, in the order of their first records."""
    return sorted({file.path.resolve(): file for file in files}.values(), key=lambda file: file.first)


def holding(files: Iterable[DbnFile], schema: str) -> list[DbnFile]:
    return [file for file in files if schema in file.kinds]


def _held(files: Iterable[DbnFile]) -> list[str]:
    return [schema for schema in dbn.SCHEMAS if any(schema in file.kinds for file in files)]


def best(schemas: Sequence[str], files: Sequence[DbnFile], given: object) -> str | None:
    """The best of `schemas` that the files hold.

    Raises:
        ValueError: they hold none and were given for it.
    """
    held = _held(files)
    found = next((schema for schema in schemas if schema in held), None)
    if found is None and given is not None:
        raise ValueError(f"{given} holds {', '.join(held)}, expected one of {', '.join(schemas)}")
    return found


def price_source(
    path: str | Path, main: Sequence[DbnFile], ticks: Sequence[DbnFile], kind: str, target: int | None, size: int,
    bars: str | None,
) -> str | None:  # fmt: skip
    """The schema of which the bars are made, None for tables.

    Raises:
        ValueError: none will do.
    """
    trades = best(dbn.TRADE_SCHEMAS, ticks, None)
    held = [schema for schema in dbn.BAR_SCHEMAS if any(schema in file.kinds for file in main)]
    fitting = [schema for schema in held if not size and (target is None or target % dbn.BAR_SCHEMAS[schema] == 0)]
    if kind == "table" and (not size or trades is None):
        if size:
            raise ValueError(f"bars {bars!r} are made of trades, and {path} holds none: give trades=")
        return None
    if target is None and not size and len(held) > 1:
        raise ValueError(f"{path} holds bars of several lengths, {', '.join(held)}: say which with bars=")
    if fitting:
        return fitting[-1]  # the longest
    if trades is None:
        what = ", ".join(_held([*main, *ticks]))
        if held:
            raise ValueError(f"{path} holds {what}, of which {bars} bars cannot be made")
        raise ValueError(f"{path} holds {what}, expected bars or trades: {', '.join(_PRICED)}")
    if target is None and not size:
        raise ValueError(f"{path} holds {trades}: say which bars to make of them, such as bars='1m' or bars='vol:1000'")
    return trades


def symbol_root(symbol: str) -> str:
    """``"ES"`` of ``"ES"``, ``"ES.FUT"``, ``"ES.c.0"`` and ``"ESH4"``."""
    name = outright(symbol, near=0)  # the year does not matter
    return name.root if name else symbol.partition(".")[0]
