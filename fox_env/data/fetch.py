"""Downloading from Databento: what is missing on disk, what it would cost, and the download, piece by piece.

The key comes from the environment alone (`KEY_VARIABLE`) and never leaves this module except to Databento: it is cut
out of every sentence, whatever the library or the server wrote. Pieces are whole calendar months, days for the heavy
schemas, each a file of its own that is put in place only when it is complete and is what was asked for.
"""

from __future__ import annotations

import base64
import datetime as dt
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fox_env.contracts import CONTRACTS
from fox_env.files import write_atomic

if TYPE_CHECKING:
    from databento import Historical

KEY_VARIABLE = "DATABENTO_API_KEY"
SCHEMAS = (
    "ohlcv-1s", "ohlcv-1m", "ohlcv-1h", "ohlcv-1d", "trades", "tbbo", "bbo-1s", "bbo-1m", "mbp-1", "mbp-10",
    "definition",
)  # fmt: skip
STYPES = ("parent", "continuous", "raw_symbol")
DAILY_SCHEMAS = ("mbp-1", "mbp-10")
"""Schemas of which a day is a file; of the others a month is."""

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Waits before a request is sent again that the server refused for the moment (429, 5xx) or that found no server."""

_LONGEST_WAIT = 60.0  # seconds that the server may ask for
_SATURDAY = 5
_DAY = dt.timedelta(days=1)
_EPOCH = dt.date(1970, 1, 1)
_SYMBOL = re.compile(r"[A-Z0-9]+(\.FUT|\.[cvn]\.\d+)?")
_READ = 1 << 20
_PREFIX = 8  # bytes of a DBN file before its metadata: "DBN", the version, the metadata's length

Value = TypeVar("Value")


@dataclass(frozen=True)
class Request:
    """What to download.

    Args:
        symbol: parent (``"ES.FUT"``), continuous (``"ES.c.0"``) or raw symbol (``"ESH4"``).
        schema: one of `SCHEMAS`.
        start, end: UTC dates, `end` exclusive.
        dataset: Databento's name of the venue's feed.
        stype: one of `STYPES`; ``""`` tells it from the symbol's form.

    Raises:
        ValueError: one of them is none of these.
    """

    symbol: str
    schema: str
    start: dt.date
    end: dt.date
    dataset: str = "GLBX.MDP3"
    stype: str = ""

    def __post_init__(self) -> None:
        if self.symbol in CONTRACTS:
            raise ValueError(
                f"symbol is {self.symbol!r}, a root, expected {self.symbol}.FUT for all its contracts, "
                f"{self.symbol}.c.0 for the front or a contract such as {self.symbol}H4"
            )
        if not _SYMBOL.fullmatch(self.symbol):
            raise ValueError(f"symbol is {self.symbol!r}, expected one such as ES.FUT, ES.c.0 or ESH4")
        if self.schema not in SCHEMAS:
            raise ValueError(f"schema is {self.schema!r}, expected one of {', '.join(SCHEMAS)}")
        if not re.fullmatch(r"[A-Z0-9]+\.[A-Z0-9]+", self.dataset):
            raise ValueError(f"dataset is {self.dataset!r}, expected one such as GLBX.MDP3")
        if self.stype not in ("", *STYPES):
            raise ValueError(f"stype is {self.stype!r}, expected one of {', '.join(STYPES)}")
        if not self.start < self.end:
            raise ValueError(f"end is {self.end}, expected a date after start, {self.start}")
        if not self.stype:
            tail = self.symbol.partition(".")[2]
            object.__setattr__(self, "stype", "parent" if tail == "FUT" else "continuous" if tail else "raw_symbol")

    def arguments(self, start: dt.date, end: dt.date) -> dict[str, object]:
        """What the library's methods take for [start, end)."""
        return {
            "dataset": self.dataset, "symbols": self.symbol, "schema": self.schema, "stype_in": self.stype,
            "start": start, "end": end,
        }  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A file of the UTC dates [start, end)."""

    start: dt.date
    end: dt.date
    path: Path


@dataclass(frozen=True)
class Plan:
    """What a request still needs.

    Args:
        request: what was asked for.
        missing: the files to download, in time order.
        whole: files that are there.
        cost_usd: Databento's estimate for the missing ones, with the account's discounts.
        records: their number of records.
        bytes: their billable size, which is uncompressed.
    """

    request: Request
    missing: tuple[Piece, ...]
    whole: int
    cost_usd: float = 0.0
    records: int = 0
    bytes: int = 0


@dataclass
class Fetcher:
    """Plans and downloads.

    Args:
        client: a ready client of the library; None makes one with the key in `KEY_VARIABLE`.
        warn: told each warning of the server, such as that of a day of degraded quality.

    Raises:
        ValueError: there is no key, or one that cannot be a key.
    """

    client: Historical | None = None
    warn: Callable[[str], object] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        if self.client is None:
            self.client = connect()

    def plan(self, out: str | os.PathLike, request: Request) -> Plan:
        """What is missing in the folder `out`, and its cost.

        A date is there if a whole file of the request holds it, whatever dates the file begins and ends with; a damaged
        file, or one of another request, is not.

        Raises:
            ValueError: the server refuses the request, in one sentence.
            OSError: the server cannot be reached or fails, or `out` cannot be read.
        """
        missing, whole = _missing(Path(out), request)
        cost, records, size = 0.0, 0, 0
        metadata = self.client.metadata
        for start, end in _runs(missing):
            arguments = request.arguments(start, end)
            cost += self._ask(lambda a=arguments: float(metadata.get_cost(**a)), "the estimate")
            records += self._ask(lambda a=arguments: int(metadata.get_record_count(**a)), "the estimate")
            size += self._ask(lambda a=arguments: int(metadata.get_billable_size(**a)), "the estimate")
        return Plan(request, tuple(missing), whole, cost, records, size)

    def download(self, plan: Plan) -> Iterator[Piece]:
        """Download the missing files, each yielded when it is in place.

        A connection that breaks while a file comes is not tried again, since what came was paid for: the next plan has
        that file, and not those before it.

        Raises:
            ValueError: the server refuses, breaks off or sends what was not asked for.
            OSError: the server cannot be reached or fails, or a file cannot be written.
        """
        for piece in plan.missing:
            arguments = plan.request.arguments(piece.start, piece.end)

            def write(partial: Path, piece: Piece = piece, arguments: dict[str, object] = arguments) -> None:
                stopped = self._ask(lambda: self._stream(partial, arguments), str(piece.path))
                fault = _fault(partial, plan.request, piece)
                if fault:
                    reason = f" ({self._clean(stopped)})" if stopped else ""
                    raise ValueError(f"what came for {piece.path} {fault}{reason}, so it was not kept")

            write_atomic(piece.path, write)
            yield piece

    def _stream(self, partial: Path, arguments: dict[str, object]) -> str:
        """Download to `partial`; why the library stopped, if it did so after the answer had begun."""
        from databento.common.error import BentoError, BentoHttpError
        from databento_dbn import DBNError

        try:
            self.client.timeseries.get_range(**arguments, path=partial)
        except BentoHttpError:
            raise
        except (BentoError, DBNError) as error:
            return str(error)
        return ""

    def _ask(self, call: Callable[[], Value], what: str) -> Value:
        """What `call` gives; after a passing fault once more, after a lasting one an error without the key in it."""
        from databento.common.error import BentoWarning

        for wait in (*RETRY_SECONDS, None):
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("ignore")
                    warnings.simplefilter("always", BentoWarning)
                    value = call()
            except Exception as error:
                fault, passing, asked_wait = _sentence(error, what)
                kind = ValueError if _is_refusal(error) else OSError
            else:
                for warning in caught:
                    self.warn(self._clean(str(warning.message)))
                return value
            # Outside of the handler, so that the library's exception, which may hold the key, is not its context.
            if not passing or wait is None:
                raise kind(self._clean(fault))
            time.sleep(min(max(wait, asked_wait), _LONGEST_WAIT))
        raise AssertionError  # the last wait is None

    def _clean(self, text: str) -> str:
        key = self.client.key
        for secret in (key, base64.b64encode(f"{key}:".encode()).decode()):
            text = text.replace(secret, "***")
        return " ".join(text.split())


def connect() -> Historical:
    """The library's client, with the key in the environment.

    Raises:
        ValueError: `KEY_VARIABLE` is not set, or holds what cannot be a key.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key.strip():
        raise ValueError(f"{KEY_VARIABLE} is not set, expected your key from databento.com/portal/keys")
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{KEY_VARIABLE} holds a space or another character that no key has")
    from databento import Historical

    return Historical(key)


def file_name(request: Request, start: dt.date | str, end: dt.date | str) -> str:
    """Name of the file of [start, end)."""
    return f"{request.dataset}-{request.symbol}-{request.schema}-{start}_{end}.dbn.zst"


def _missing(out: Path, request: Request) -> tuple[list[Piece], int]:
    """The files to download, and how many of the request are there."""
    folder = out / request.symbol
    date = r"(\d{4}-\d\d-\d\d)"
    pattern = re.compile(re.escape(file_name(request, "{}", "{}")).replace(re.escape("{}"), date))
    there = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            piece = Piece(*map(dt.date.fromisoformat, match.groups()), path)
            if piece.start < request.end and piece.end > request.start and not _fault(path, request, piece):
                there.append(piece)
    pieces, day = [], request.start
    for piece in sorted(there, key=lambda piece: piece.start):
        pieces += _cut(day, piece.start, request.schema)
        day = max(day, piece.end)
    pieces += _cut(day, request.end, request.schema)
    return [Piece(a, b, folder / file_name(request, a, b)) for a, b in pieces], len(there)


def _cut(start: dt.date, end: dt.date, schema: str) -> list[tuple[dt.date, dt.date]]:
    """[start, end) in months or days. A Saturday, on which nothing trades, goes with the Friday before it."""
    days = [start + _DAY * k for k in range((end - start).days)]
    if not days:
        return []
    if schema in DAILY_SCHEMAS:
        cuts = [day for day in days if day == start or day.weekday() != _SATURDAY]
    else:
        cuts = [day for day in days if day in (start, day.replace(day=1))]
    return list(zip(cuts, [*cuts[1:], end], strict=True))


def _runs(pieces: list[Piece]) -> list[tuple[dt.date, dt.date]]:
    """The ranges that pieces without a hole between them make, so that an estimate takes few requests."""
    runs: list[tuple[dt.date, dt.date]] = []
    for piece in pieces:
        if runs and runs[-1][1] == piece.start:
            runs[-1] = (runs[-1][0], piece.end)
        else:
            runs.append((piece.start, piece.end))
    return runs


def _fault(path: Path, request: Request, piece: Piece) -> str:
    """What is wrong with a file, as the rest of a sentence; empty if it is whole and holds what was asked for."""
    import zstandard

    head, size, frame = b"", 0, None
    try:
        with open(path, "rb") as file:
            while data := file.read(_READ):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    plain = frame.decompress(data)
                    size += len(plain)
                    if len(head) < _READ:
                        head += plain
                    data = b""
                    if frame.eof:
                        data, frame = frame.unused_data, None
    except zstandard.ZstdError:
        return "is not zstd"
    if frame is not None or not size:
        return "is cut short"
    begin = _PREFIX + int.from_bytes(head[4:_PREFIX], "little")
    if not head.startswith(b"DBN") or len(head) < begin:
        return "is not DBN"
    from databento_dbn import Metadata

    try:
        meta = Metadata.decode(head[:begin])
    except Exception:  # the decoder raises whatever it meets
        return "has damaged metadata"
    if size > begin and (size - begin) % (4 * head[begin] or size):
        return "is cut short"
    held = (meta.dataset, str(meta.schema), str(meta.stype_in), list(meta.symbols))
    wanted = (request.dataset, request.schema, request.stype, [request.symbol])
    for what, mine, theirs in zip(("dataset", "schema", "stype", "symbols"), wanted, held, strict=True):
        if mine != theirs:
            return f"has {what} {theirs}, expected {mine}"
    first, last = (int((day - _EPOCH) / dt.timedelta(microseconds=1)) * 1000 for day in (piece.start, piece.end))
    if meta.start < first or (meta.end or last) > last:
        return f"begins or ends outside {piece.start} to {piece.end}"
    return ""


def _is_refusal(error: Exception) -> bool:
    return 400 <= getattr(error, "http_status", 0) < 500 and error.http_status not in (408, 429)


def _sentence(error: Exception, what: str) -> tuple[str, bool, float]:
    """What a failed request means, whether it may pass, and the seconds that the server asks to wait."""
    import requests

    status = getattr(error, "http_status", None)
    if status is not None:
        told = error.message or "no reason given"
        meaning = {
            401: f"{KEY_VARIABLE} holds a key that Databento does not know",
            402: "the account has no means to pay for this",
            403: "the account may not have this data",
            408: "Databento gave up waiting",
            422: "Databento cannot serve this request",
            429: "Databento says that these are too many requests",
        }.get(status, "Databento has a fault of its own" if status >= 500 else "Databento refuses the request")
        asked = str(error.headers.get("Retry-After", ""))
        wait = float(asked) if asked.isdecimal() else 0.0
        return f"{what}: {meaning} ({status}: {told})", status in (408, 429) or status >= 500, wait
    if isinstance(error, requests.Timeout | requests.ConnectionError):
        return f"{what}: Databento cannot be reached, is the network up? ({type(error).__name__})", True, 0.0
    return f"{what}: {type(error).__name__}: {error}", False, 0.0
