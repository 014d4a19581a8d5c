"""Times as tables hold them (texts, epoch numbers, timestamps) to UTC nanoseconds."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_EXPECTED = "expected dates such as 2024-01-09 15:00 or s, ms, µs or ns since 1970"

_DAY_NS = 86_400_000_000_000
_QUARTER_NS = 900_000_000_000  # no zone has changed its clocks off a quarter of an hour for a century
_EPOCH = dt.date(1970, 1, 1)
_EPOCH_UNITS = ((5e8, 1e10, 10**9), (5e11, 1e13, 10**6), (5e14, 1e16, 1000), (5e17, 2.0**63, 1))
"""Least and greatest epoch number of a unit, and its nanoseconds: from 1985 on, so that twelve digits are a date."""

_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?: ?[AaPp][Mm])?|\d{4}|\d{6}"
_OFFSET = r"Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?"
_FORMS = (  # a date with separators, and one of eight digits, which needs no space before the clock
    rf"^(?P<date>\d{{1,4}}[-/.]\d{{1,2}}[-/.]\d{{1,4}})(?:[T ]+(?P<clock>{_CLOCK}))? ?(?P<offset>{_OFFSET})?$",
    rf"^(?P<date>\d{{8}})(?:[T ]*(?P<clock>{_CLOCK}))? ?(?P<offset>{_OFFSET})?$",
)
_CLOCK_PARTS = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)?(?: ?([AaPp])[Mm])?")
_YEAR_LAST = re.compile(r"(\d{1,2})[-/.](\d{1,2})[-/.]\d{4}")
_NUMBER = re.compile(r"\d+(\.\d*)?([eE]\+?\d+)?")
_MISSING = ("", "nan", "nat", "none", "null", "na", "n/a")


class Times:
    """The time column of one file, taken batch by batch.

    Numbers are seconds, milli-, micro- or nanoseconds since 1970 UTC, told apart by their size; those of 8, 12 or 14
    digits are dates (``20150320``, ``201503200930``, ``20150320093000``). Texts are such numbers, or a date, a clock
    and an offset from UTC, of which the last two may be absent. A date has its year first, or last: then a number over
    12 anywhere in the column tells the day from the month; without one, dates with slashes are month first and others
    are refused. Clocks without colons are HHmmss if one of them has more than four digits, else HHmm.

    Args:
        file: for messages.
        name: the column, for messages, and to know a header that is repeated among the rows, which counts as no time.
        row: the number that the user knows for the k-th row, k from 0.

    Attributes:
        order: once finished, what comes first in dates whose year is last: ``"day"``, ``"month"``, or ``"either"``
            where no number tells; empty without such dates.
    """

    order = ""

    def __init__(self, file: Path, name: str, row: Callable[[int], int]) -> None:
        self._file, self._name, self._row = file, name, row
        self._known: list[np.ndarray] = []
        self._held: list[bool] = []  # whether a batch has any time; those without are not kept
        self._values: list[np.ndarray] = []
        self._texts = tuple(Texts() for _ in range(3))  # dates, clocks and offsets
        self._kind: str | int | None = None

    def add(self, column: pa.Array, clock: pa.Array | None = None) -> None:
        """Take the next rows, and their clock times where these have a column of their own.

        Raises:
            ValueError: a value that is no time, or of another kind than those before.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = plain(column)
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_finite(column), column, None)
        pieces: Sequence[pa.Array] = ()
        if pa.types.is_timestamp(column.type):
            kind: str | int = "local" if column.type.tz is None else "instant"
            values = self._timestamps(column)
        else:
            column = self._text(column) if pa.types.is_string(column.type) else column
            kind, values = ("text", None) if clock is not None else self._epochs(column)
        if values is None:
            column = self._text(column)
            pieces = self._split(column, clock)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        if clock is not None and pieces:
            known = known & pc.not_equal(pieces[1], "").to_numpy(zero_copy_only=False)
        if known.any():
            if self._kind not in (None, kind):
                raise self._error(
                    "another kind of time", self._count() + int(known.argmax()), "expected one throughout"
                )
            self._kind = kind
            for texts, piece in zip(self._texts, pieces, strict=False):
                texts.add(piece)
            if values is not None:
                self._values.append(values)
        self._held.append(bool(known.any()))
        self._known.append(known)

    def finish(self, zone: ZoneInfo | None, counts: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
        """UTC nanoseconds of each row, int64 [T], and which rows have a time, bool [T].

        Args:
            zone: of times without an offset. Of two times with the same clock, when daylight saving time ends, it is
                the first; clocks that are skipped when it begins have no time.
            counts: ``bad_time``, ``ambiguous_time`` and ``nonexistent_time`` are added to.

        Raises:
            ValueError: a date or clock that does not exist, dates of unknown order, times with and without an offset,
                or times without one and no `zone`.
        """
        known = np.concatenate(self._known)
        counts["bad_time"] += int(np.count_nonzero(~known))
        time, local = np.zeros(len(known), np.int64), self._kind == "local"
        held = np.repeat(self._held, [len(part) for part in self._known])
        if self._kind == "text":
            time[held], local = self._read_texts(np.flatnonzero(held), known[held])
        elif self._values:
            time[held] = np.concatenate(self._values)
        self._values.clear()
        if not local:
            return time, known
        if zone is None:
            raise ValueError(
                f"{self._file} has times without a time zone, such as {shown_time(time[known][0])}: "
                "give tz=, such as 'America/Chicago'"
            )
        time, skipped, repeated = to_utc(time, zone)
        counts["nonexistent_time"] += int(np.count_nonzero(skipped & known))
        counts["ambiguous_time"] += int(np.count_nonzero(repeated & known))
        return time, known & ~skipped

    def _error(self, what: str, k: int, why: str) -> ValueError:
        """The error for `what` stands in the k-th row of all."""
        return ValueError(f"{self._file} has {what} in its time column {self._name!r} in row {self._row(k)}, {why}")

    def _bad(self, value: object, k: int) -> ValueError:
        """The error for a value, k being its row in the present batch."""
        return self._error(shown(value), self._count() + k, _EXPECTED)

    def _count(self) -> int:
        return sum(map(len, self._known))

    def _timestamps(self, column: pa.Array) -> np.ndarray:
        """Nanoseconds of Arrow's timestamps."""
        import pyarrow as pa

        unit = column.type.unit
        factor = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}[unit]
        values = column.cast(pa.int64()).fill_null(0).to_numpy()
        most = (2**63 - 2 * _DAY_NS) // factor
        wide = (values > most) | (values < -most)
        if wide.any():
            k = int(wide.argmax())
            raise self._bad(f"{values[k]} {unit} since 1970", k)
        return values * factor

    def _epochs(self, column: pa.Array) -> tuple[str | int, np.ndarray | None]:
        """The unit in nanoseconds, and the nanoseconds, of epoch numbers; ``"text"`` and None if they are none."""
        import pyarrow as pa

        numbers = column
        if pa.types.is_string(column.type):
            known = column.is_valid().to_numpy(zero_copy_only=False)
            if not _NUMBER.fullmatch(column[int(known.argmax())].as_py() or ""):
                return "text", None
            for kind in (pa.int64(), pa.float64()):  # whole numbers do not lose digits in a float
                try:
                    numbers = column.cast(kind)
                    break
                except pa.ArrowInvalid:
                    pass
            else:
                return "text", None
        known = numbers.is_valid().to_numpy(zero_copy_only=False)
        values = numbers.drop_null().to_numpy(zero_copy_only=False)
        fitting = [unit for least, most, unit in _EPOCH_UNITS if np.all((values >= least) & (values < most))]
        if len(fitting) != 1:  # without any value all would do
            return "text", None
        factor = fitting[0]
        if values.dtype.kind == "f":
            whole = np.floor(values)
            nanoseconds = whole.astype(np.int64) * factor + np.round((values - whole) * factor).astype(np.int64)
        else:
            nanoseconds = values.astype(np.int64) * factor
        time = np.zeros(len(numbers), np.int64)
        time[known] = nanoseconds
        return factor, time

    def _text(self, column: pa.Array) -> pa.Array:
        """Texts without spaces around them, null where there is no time."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if pa.types.is_floating(column.type):
            with suppress(pa.ArrowInvalid):
                column = column.cast(pa.int64())  # dates such as 20240109.0, beside missing ones
        text = pc.utf8_trim(column.cast(pa.string()), ' \t"')
        missing = pc.is_in(pc.utf8_lower(text), pa.array([*_MISSING, self._name.lower()]))
        return pc.if_else(missing, None, text)

    def _split(self, text: pa.Array, clock: pa.Array | None) -> list[pa.Array]:
        """The dates, clocks and offsets of texts, empty where there is none."""
        import pyarrow.compute as pc

        for form in _FORMS:
            parts = pc.extract_regex(text, form)
            if parts.null_count < len(parts) or text.null_count == len(text):
                break
        if parts.null_count > text.null_count:
            k = int(pc.index(pc.and_(parts.is_null(), text.is_valid()), True).as_py())
            raise self._bad(text[k].as_py(), k)
        pieces = [pc.struct_field(parts, name).fill_null("") for name in ("date", "clock", "offset")]
        if clock is not None:
            pieces[1] = self._text(plain(clock)).fill_null("")
        return pieces

    def _read_texts(self, place: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, bool]:
        """Nanoseconds, and whether they are of a local clock; `place` is each row's place among all."""
        time = np.zeros(len(known), np.int64)
        for texts, parse, factor in zip(self._texts, (_days, _clocks, _offsets), (_DAY_NS, 1, -1), strict=True):
            which, distinct = texts.finish()
            used = np.zeros(len(distinct), bool)
            used[which[known]] = True
            if parse is _days:
                self.order = _order([text for k, text in enumerate(distinct) if used[k]])
            values, bad, why = parse([text if used[k] else "" for k, text in enumerate(distinct)])
            if bad is not None:
                raise self._error(shown(distinct[bad]), int(place[np.argmax((which == bad) & known)]), why)
            time += (values * factor)[which]
        lacking = known & np.array([text == "" for text in distinct])[which]  # of the last, the offsets
        if lacking.any() and not np.array_equal(lacking, known):
            raise self._error("no offset from UTC", int(place[lacking.argmax()]), "expected one as in other rows")
        return time, bool(lacking.any())


class Texts:
    """A column of texts with few different ones, taken batch by batch."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._rows: list[np.ndarray] = []

    def add(self, column: pa.Array) -> None:
        """Take the next rows: strings without nulls."""
        encoded = column.dictionary_encode()
        codes = [self._codes.setdefault(text, len(self._codes)) for text in encoded.dictionary.to_pylist()]
        self._rows.append(np.array(codes, np.int32)[encoded.indices.to_numpy()])

    def finish(self) -> tuple[np.ndarray, list[str]]:
        """The different texts, and for each row, int32 [T], which of them it is."""
        rows = np.concatenate(self._rows)
        self._rows.clear()
        return rows, list(self._codes)


def looks_whole(column: pa.Array) -> bool:
    """Whether a column's first value is a moment: a timestamp, an epoch number, or a date with a clock."""
    import pyarrow as pa

    column = plain(column)
    if pa.types.is_timestamp(column.type):
        return True
    value = next((text for text in column.drop_null().slice(0, 100).cast(pa.string()).to_pylist() if text.strip()), "")
    value = value.strip(' \t"')
    match = next(filter(None, (re.match(form, value) for form in _FORMS)), None)
    if match:
        return match["clock"] is not None
    return _NUMBER.fullmatch(value) is not None and float(value) >= _EPOCH_UNITS[0][0]


def to_utc(local: np.ndarray, zone: ZoneInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """UTC nanoseconds of wall-clock times in nanoseconds since 1970-01-01 00:00 of the same clock, int64 [T].

    Also, bool [T], which clocks are skipped when daylight saving time begins, and which happen twice when it ends; of
    these the first is meant.
    """
    days, day = _distinct(local // _DAY_NS)
    begin, end = (_utc_offsets((days + k) * _DAY_NS, zone)[:, 0] for k in (0, 1))
    first = begin[day]
    second = first.copy()
    changing = np.flatnonzero((begin != end)[day])
    if len(changing):
        quarters, quarter = _distinct(local[changing] // _QUARTER_NS)
        first[changing], second[changing] = _utc_offsets(quarters * _QUARTER_NS, zone)[quarter].T
    return local - first, first < second, first > second


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values and each one's index, quick where values come in runs."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    distinct, which = np.unique(values[starts], return_inverse=True)
    return distinct, np.repeat(which, np.diff(starts, append=len(values)))


def _utc_offsets(local: np.ndarray, zone: ZoneInfo) -> np.ndarray:
    """Nanoseconds by which the clock is ahead of UTC, int64 [T, 2]: before and after a change that the time meets."""
    offsets = np.empty((len(local), 2), np.int64)
    for k, seconds in enumerate((local // 10**9).tolist()):
        moment = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)
        for fold in (0, 1):
            offset = moment.replace(tzinfo=zone, fold=fold).utcoffset()
            offsets[k, fold] = (offset.days * 86_400 + offset.seconds) * 10**9
    return offsets


def plain(column: pa.Array) -> pa.Array:
    """A column of numbers, timestamps or strings; others become strings."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_timestamp(kind):
        return column
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64())
    if pa.types.is_nested(kind):
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())


def shown(value: object) -> str:
    """A value for a message: in one line, and not long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def shown_time(time: int) -> str:
    """Nanoseconds for a message."""
    return str(np.datetime64(int(time) // 10**9, "s")).replace("T", " ")


Parsed = tuple[np.ndarray, int | None, str]  # values, index of the first text that cannot be read, and why


def _days(texts: Sequence[str]) -> Parsed:
    """Days since 1970 of dates."""
    values = np.zeros(len(texts), np.int64)
    last: list[tuple[int, int, int, int]] = []  # year last: index, the two other numbers, year
    for k, text in enumerate(texts):
        if not text:
            continue
        if len(text) == 8 and text.isdigit():
            numbers = [text[:4], text[4:6], text[6:]]
        else:
            numbers = re.split(r"[-/.]", text)
        if len(numbers[0]) == 4:
            day = _day(*map(int, numbers))
            if day is None:
                return values, k, "which is no date from 1678 to 2261"
            values[k] = day
        elif len(numbers[2]) == 4:
            last.append((k, *map(int, numbers)))
        else:
            return values, k, "expected years of four digits"
    day_first = next((k for k, a, _, _ in last if a > 12), None)
    month_first = next((k for k, _, b, _ in last if b > 12), None)
    if day_first is not None and month_first is not None:
        return values, day_first, f"where the day comes first, and {texts[month_first]!r}, where the month does"
    for k, a, b, year in last:
        if day_first is None and month_first is None and "/" not in texts[k]:
            return values, k, "of which nothing tells the day from the month: write dates with the year first"
        day = _day(year, a, b) if day_first is None else _day(year, b, a)
        if day is None:
            return values, k, "which is no date from 1678 to 2261"
        values[k] = day
    return values, None, ""


def _order(texts: Sequence[str]) -> str:
    """`Times.order` of dates."""
    pairs = [(int(match[1]), int(match[2])) for match in map(_YEAR_LAST.fullmatch, texts) if match]
    if not pairs:
        return ""
    return "day" if max(a for a, _ in pairs) > 12 else "month" if max(b for _, b in pairs) > 12 else "either"


def _day(year: int, month: int, day: int) -> int | None:
    """Days since 1970, None for no date that nanoseconds reach."""
    if not 1678 <= year <= 2261:
        return None
    try:
        return (dt.date(year, month, day) - _EPOCH).days
    except ValueError:
        return None


def _clocks(texts: Sequence[str]) -> Parsed:
    """Nanoseconds since midnight of clock times, 0 for none."""
    values = np.zeros(len(texts), np.int64)
    digits = max((len(text) for text in texts if text.isdigit()), default=0)
    for k, text in enumerate(texts):
        if not text:
            continue
        if text.isascii() and text.isdigit() and digits <= 6:
            padded = text.zfill(6) if digits > 4 else text.zfill(4) + "00"
            text = f"{padded[:2]}:{padded[2:4]}:{padded[4:]}"
        match = _CLOCK_PARTS.fullmatch(text)
        if match is None:
            return values, k, "which is no clock time such as 15:00 or 150000"
        hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
        if match[5]:
            if not 1 <= hour <= 12:
                return values, k, "which is no clock time"
            hour = hour % 12 + (12 if match[5] in "Pp" else 0)
        if hour > 23 or minute > 59 or second > 59:
            return values, k, "which is no clock time"
        values[k] = ((hour * 60 + minute) * 60 + second) * 10**9 + int((match[4] or "").ljust(9, "0"))
    return values, None, ""


def _offsets(texts: Sequence[str]) -> Parsed:
    """Nanoseconds by which clocks are ahead of UTC, 0 for none."""
    values = np.zeros(len(texts), np.int64)
    for k, text in enumerate(texts):
        if text[:1] in ("+", "-"):
            hours, minutes = int(text[1:3]), int(text[3:].lstrip(":") or 0)
            if hours > 15 or minutes > 59:
                return values, k, "which is no offset from UTC"
            values[k] = (hours * 60 + minutes) * 60 * 10**9 * (-1 if text[0] == "-" else 1)
    return values, None, ""
