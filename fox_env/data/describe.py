"""What a market holds: sessions, rolls, gaps and oddities as numbers, as a printed page and as a chart."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fox_env import dynamics
from fox_env.data.bars import INTERVALS_NS
from fox_env.data.calendar import CHICAGO, trade_dates, trading_periods
from fox_env.files import write_atomic

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fox_env.data.features import Parity
    from fox_env.market import Market

WIDTH = 100
"""Columns of the printed page."""

LONGEST_GAPS, LARGEST_MOVES = 12, 5
"""Gaps, and ranges, moves and flat runs, that are listed one by one."""

_LEAST_GAP_NS = 60_000_000_000
_DAY_NS = 86_400_000_000_000
_EARLY = dt.time(15, 0)  # a session that closes before this closes early
_CHART_POINTS = 2_000
_CHART_NAMES = 16  # contracts above which their names would overlap

_SUBJECTS = {"rows": "rows", "trades": "trades", "book": "book records", "bars": "bars", "files": "files"}
_WORDS = {
    "read": "read",
    "without_records": "without a record",
    "without_bars": "without a bar",
    "other_schemas": "of a schema that a market is not made of",
    "spreads": "of calendar spreads, dropped",
    "other_symbols": "of other symbols, dropped",
    "unmapped": "whose instrument has no symbol, dropped",
    "broken": "with too many or too few cells, dropped",
    "bad_time": "without a readable time, dropped",
    "ambiguous_time": "in the hour that the clock shows twice, read as the first",
    "nonexistent_time": "in the hour that the clock skips, dropped",
    "unsorted": "out of time order",
    "unordered": "out of time order",
    "bad_price": "without a usable price, dropped",
    "off_tick": "with a price off the tick, rounded to it",
    "range_widened": "whose high or low did not enclose their prices, widened",
    "without_volume": "without a volume, taken as 0",
    "zero_volume": "with a volume of 0",
    "zero_size": "with a size of 0, dropped",
    "duplicate": "that repeat an earlier one, dropped",
    "conflicting": "that contradict an earlier one, dropped",
    "overlapping": "that overlap what came before, dropped",
    "closed_hours": "in closed hours, dropped",
    "misaligned": "that reach over the end of the longer bar, dropped",
    "after_expiry": "after their contract's expiry, dropped",
    "behind_front": "of contracts behind the front, dropped",
    "unfinished": "unfinished at the end of the data, dropped",
    "without_book": "in sessions without a book, left out",
    "without_trades": "in sessions without trades, left out",
    "volume_differs": "whose volume is not that of their trades",
    "records": "of the market's contracts",
    "outside_bars": "in no bar",
    "empty": "with an empty book, masked",
    "one_sided": "with a one-sided book, masked",
    "crossed": "with a crossed book, masked",
    "maybe_bad": "that the exchange's feed marks as doubtful, masked",
    "seeds": "that start the order flow anew",
    "events": "that the order flow is made of",
}
_WHOLE = {
    "files": "files",
    "definitions": "definitions that the contract's terms were compared with",
    "contracts": "contracts",
    "contracts_never_front": "contracts that never were the front",
    "rolls": "rolls",
    "rolls_unmeasured": "rolls whose gap could not be measured",
    "warmup_bars": "bars on which the features warm up, no decision bars",
    "flat_bars": "bars with high = low",
    "impossible_returns": "bars that open where no market can after the bar before",
}


def describe(market: Market) -> dict[str, Any]:
    """What a market holds, of types that JSON has.

    Times are ISO, UTC; a session is named by its trade date; prices, ranges and moves are points; durations seconds.
    What is `seen` is told from the bars, not from the calendar:

    - A gap is the trading time that the calendar has between the end of a bar and the start of the next, if that is a
      bar and a minute or more: ``in_sessions``, ``beside_breaks`` (it begins or ends with a session) or ``at_rolls``.
      ``breaks`` are all stretches between two sessions, by the clock, those at rolls left out; ``most`` are the
      sessions that lack the most.
    - A weekday without a bar is ``closed`` where the calendar has no session, else ``missing``. A session is ``short``
      if the first bar starts or the last one ends half an hour or more inside it, and ``short_at_roll`` if it is
      the first or last of its contract besides.
    - The halt is seen in a session with bars before 15:15 and after 15:30 in Chicago, and none between.
    - A flat run is bars with high = low at one price, one after another in a session.
    """
    bars, rows = market.bars, _session_rows(market)
    features = [{"name": column.name, "parity": _parity(column.parity)} for column in market.columns]
    return {
        "contract": market.contract.name,
        "interval": _interval(market),
        "hours": _hours(market),
        "bars": len(market),
        "decision_bars": int(np.count_nonzero(market.decision)),
        "first": _iso(bars.start[0]),
        "last": _iso(bars.ts[-1]),
        "contracts": _contracts(market),
        "sessions": _sessions(market, rows),
        "gaps": _gap_lists(market),
        "locked_bars": {
            "up": int(np.count_nonzero(market.lock > 0)),
            "down": int(np.count_nonzero(market.lock < 0)),
            "sessions": [_day(day) for day in np.unique(market.session[market.lock != 0])],
        },
        "flat_bars": {"count": int(np.count_nonzero(bars.high == bars.low)), "longest_runs": _flat_runs(market)},
        "largest_ranges": [
            {"at": _iso(bars.start[k]), "range": float(bars.high[k] - bars.low[k])}
            for k in _largest(bars.high - bars.low, LARGEST_MOVES)
        ],
        "largest_moves": _moves(market),
        "volume": float(np.nansum(bars.volume)),
        "quotes": _quotes(market),
        "columns": {name: float(np.isfinite(column).mean()) for name, column in bars.extra.items()},
        "features": features,
        "quality": _quality(market.quality),
        "provenance": {name: _plain(value) for name, value in market.provenance.items()},
    }


# --- The numbers ------------------------------------------------------------------------------------------------------


def _contracts(market: Market) -> list[dict[str, Any]]:
    first = np.flatnonzero(np.diff(market.instrument, prepend=-1))
    last = np.append(first[1:], len(market)) - 1
    return [
        {
            "contract": market.instruments[market.instrument[a]],
            "first_session": _day(market.session[a]),
            "last_session": _day(market.session[b]),
            "bars": int(b - a + 1),
            "roll": None
            if market.roll[a] == dynamics.NO_ROLL
            else "measured"
            if market.roll[a] == dynamics.MEASURED
            else "unmeasured",
            "gap": float(market.gap[a]) if market.roll[a] == dynamics.MEASURED else None,
        }
        for a, b in zip(first, last, strict=True)
    ]


def _session_rows(market: Market) -> tuple[np.ndarray, np.ndarray]:
    """First row of each session and the row after its last."""
    first = np.flatnonzero(np.diff(market.session, prepend=market.session[0] - 1))
    return first, np.append(first[1:], len(market))


def _sessions(market: Market, rows: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    start, ts, hours = market.bars.start, market.ts, _hours(market)
    first, end = rows
    days = market.session[first]
    table = trade_dates(int(start[0]), int(ts[-1]), hours=hours)
    known = np.searchsorted(table.date, days)
    opens, closes = table.open[known], table.close[known]
    late = start[first] - opens
    early = closes - ts[end - 1]
    half_hour = 30 * 60 * 1_000_000_000
    short = (late >= half_hour) | (early >= half_hour)
    rolls = market.roll[first] != dynamics.NO_ROLL
    at_roll = rolls | np.append(rolls[1:], False)

    weekdays = np.arange(days[0], days[-1] + 1)
    weekdays = weekdays[(weekdays + 3) % 7 < 5]  # 1970-01-01 was a Thursday
    absent = weekdays[~np.isin(weekdays, days)]
    closed = ~np.isin(absent, table.date)

    closing: dict[str, list[int]] = {}
    for k, close in enumerate(closes):
        clock = _chicago(close)
        if clock.time() < _EARLY:
            closing.setdefault(f"{clock:%H:%M}", []).append(k)
    after_four = ts[end - 1] > _clocks(days, 16, 0)
    halted = _halted(market, rows)
    return {
        "count": len(days),
        "first": _day(days[0]),
        "last": _day(days[-1]),
        "closed_weekdays": [_day(day) for day in absent[closed]],
        "missing": [_day(day) for day in absent[~closed]],
        "early_closes": [
            {
                "close": clock,
                "sessions": [_day(days[k]) for k in rows],
                "last_bar_ends": sorted({f"{_chicago(ts[end[k] - 1]):%H:%M}" for k in rows}),
            }
            for clock, rows in sorted(closing.items())
        ],
        **{
            name: [
                {"session": _day(days[k]), "first": _iso(start[first[k]]), "last": _iso(ts[end[k] - 1])}
                for k in np.flatnonzero(short & (at_roll == flag))
            ]
            for name, flag in (("short", False), ("short_at_roll", True))
        },
        "halt_seen": _span(days[halted]),
        "after_16_00_seen": _span(days[after_four]),
    }


def _halted(market: Market, rows: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Sessions with bars on both sides of 15:15 to 15:30 in Chicago and none in it; bool [sessions]."""
    first, end = rows
    begin = _clocks(market.session[first], 15, 15)
    over = begin + 15 * 60 * 1_000_000_000
    inside = np.searchsorted(market.ts, begin, side="right")
    after = np.searchsorted(market.bars.start, over, side="left")
    return (inside > first) & (after < end) & (after == inside)


def _gaps(market: Market) -> dict[str, np.ndarray]:
    """Between each bar and the next, [T − 1]: bounds, wall and trading time in ns, whether session and contract
    change."""
    begin, end = market.ts[:-1], market.bars.start[1:]
    opens, closes = trading_periods(hours=_hours(market))
    before = np.concatenate([[0], np.cumsum(closes - opens)])

    def traded(time: np.ndarray) -> np.ndarray:
        period = np.searchsorted(opens, time, side="right") - 1
        return before[period] + np.minimum(time, closes[period]) - opens[period]

    trading = np.zeros(len(begin), np.int64)
    apart = np.flatnonzero(end > begin)
    trading[apart] = traded(end[apart]) - traded(begin[apart])
    return {
        "from": begin, "to": end, "wall": end - begin, "trading": trading,
        "session": market.session[1:], "break": np.diff(market.session) != 0,
        "roll": market.roll[1:] != dynamics.NO_ROLL,
    }  # fmt: skip


def _gap_lists(market: Market) -> dict[str, Any]:
    gaps = _gaps(market)
    counted = gaps["trading"] >= _least_gap(market)
    lists: dict[str, Any] = {"least_s": _least_gap(market) / 1e9}
    for name, chosen, by in (
        ("in_sessions", counted & ~gaps["break"], "trading"),
        ("beside_breaks", counted & gaps["break"] & ~gaps["roll"], "trading"),
        ("at_rolls", counted & gaps["roll"], "trading"),
        ("breaks", gaps["break"] & ~gaps["roll"], "wall"),
    ):
        rows = np.flatnonzero(chosen)
        lists[name] = {
            "count": len(rows),
            "trading_s": float(gaps["trading"][rows].sum() / 1e9),
            "longest": [
                {
                    "from": _iso(gaps["from"][k]),
                    "to": _iso(gaps["to"][k]),
                    "wall_s": float(gaps["wall"][k] / 1e9),
                    "trading_s": float(gaps["trading"][k] / 1e9),
                }
                for k in rows[_largest(gaps[by][rows], LONGEST_GAPS)]
            ],
        }
    rows = np.flatnonzero(counted & ~gaps["break"])
    days, which = np.unique(gaps["session"][rows], return_inverse=True)
    missing = np.bincount(which, gaps["trading"][rows], len(days)) / 1e9
    lists["in_sessions"]["most"] = [
        {"session": _day(days[k]), "trading_s": float(missing[k])} for k in _largest(missing, LONGEST_GAPS)
    ]
    return lists


def _flat_runs(market: Market) -> list[dict[str, Any]]:
    bars = market.bars
    flat = bars.high == bars.low
    new = np.ones(len(bars), bool)
    same = (bars.close[1:] == bars.close[:-1]) & (market.session[1:] == market.session[:-1])
    new[1:] = ~(flat[1:] & flat[:-1] & same)
    first = np.flatnonzero(new)
    length = np.where(flat[first], np.diff(np.append(first, len(bars))), 0)
    return [
        {
            "from": _iso(bars.start[first[k]]),
            "to": _iso(bars.ts[first[k] + length[k] - 1]),
            "bars": int(length[k]),
            "price": float(bars.close[first[k]]),
        }
        for k in _largest(length, LARGEST_MOVES)
        if length[k] > 1
    ]


def _moves(market: Market) -> list[dict[str, Any]]:
    """Largest changes from close to close, those over unmeasured rolls left out."""
    change = np.diff(market.bars.close) - np.where(market.roll[1:] == dynamics.MEASURED, market.gap[1:], 0.0)
    change[market.roll[1:] == dynamics.UNMEASURED] = 0.0
    return [
        {"at": _iso(market.bars.start[k + 1]), "move": float(change[k]), "after_break": bool(market.after_break[k + 1])}
        for k in _largest(np.abs(change), LARGEST_MOVES)
    ]


def _quotes(market: Market) -> dict[str, Any] | None:
    """How many bars have which quote at their close; None for a market without quotes."""
    bid, ask = market.bars.bid, market.bars.ask
    if bid is None or ask is None:
        return None
    there = np.isfinite(bid).astype(int) + np.isfinite(ask)
    crossed = int(np.count_nonzero((there == 2) & (bid > ask)))
    both = int(np.count_nonzero(there == 2)) - crossed
    return {
        "two_sided": both,
        "two_sided_share": both / len(market),
        "one_sided": int(np.count_nonzero(there == 1)),
        "none": int(np.count_nonzero(there == 0)),
        "crossed": crossed,
    }


def _quality(quality: Mapping[str, object]) -> list[dict[str, Any]]:
    return [
        {"name": name, "count": int(count), "words": _words(name), "first": quality.get(f"{name}_first")}
        for name, count in quality.items()
        if not name.endswith("_first") and isinstance(count, int | np.integer)
    ]


def _words(name: str) -> str:
    subject, _, rest = name.partition("_")
    if name in _WHOLE:
        return _WHOLE[name]
    if subject in _SUBJECTS and rest in _WORDS:
        return f"{_SUBJECTS[subject]} {_WORDS[rest]}"
    return name.replace("_", " ")


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Rows of the largest values, the largest first, equal ones in order."""
    values = np.nan_to_num(values, nan=-np.inf)
    if len(values) > count:
        rows = np.flatnonzero(values >= np.partition(values, -count)[-count])
    else:
        rows = np.arange(len(values))
    return rows[np.argsort(-values[rows], kind="stable")][:count]


def _interval(market: Market) -> str:
    if market.interval_ns:
        names = {length: name for name, length in INTERVALS_NS.items()}
        return names.get(market.interval_ns, f"{market.interval_ns / 1e9:g} s")
    return str(market.provenance.get("bars", "volume"))


def _hours(market: Market) -> str:
    return str(market.provenance.get("hours", "all"))


def _least_gap(market: Market) -> int:
    return max(market.interval_ns, _LEAST_GAP_NS)


def _parity(parity: Parity) -> str:
    if parity.kind == "complement":
        return f"complement({parity.total:g})"
    return parity.kind if parity.partner is None else f"{parity.kind}({parity.partner})"


def _span(days: np.ndarray) -> dict[str, Any] | None:
    if not len(days):
        return None
    return {"sessions": len(days), "first": _day(days[0]), "last": _day(days[-1])}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _iso(time: int) -> str:
    return str(np.datetime_as_string(np.datetime64(int(time) // 1_000_000_000, "s"))) + "Z"


def _date(day: int) -> dt.date:
    return dt.date(1970, 1, 1) + dt.timedelta(int(day))


def _day(day: int) -> str:
    return _date(day).isoformat()


def _chicago(time: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(time) / 1e9, CHICAGO)


def _clocks(days: np.ndarray, hour: int, minute: int) -> np.ndarray:
    """UTC nanoseconds of a clock time of Chicago on each of these trade dates, int64."""
    times = [dt.datetime.combine(_date(day), dt.time(hour, minute), CHICAGO).timestamp() for day in days]
    return np.array(times, np.int64) * 1_000_000_000


# --- The page ---------------------------------------------------------------------------------------------------------


def print_description(description: Mapping[str, Any], console: Console) -> None:
    """Print what `describe` found, in a layout for `WIDTH` columns."""
    for part in _page(description):
        console.print(part, highlight=False)
        console.print()


def _page(about: Mapping[str, Any]) -> Iterator[RenderableType]:
    sessions, gaps = about["sessions"], about["gaps"]
    quotes, locked, flat = about["quotes"], about["locked_bars"], about["flat_bars"]
    facts = [
        ("bars", f"{about['contract']}, {about['bars']:,} of {about['interval']}, hours {about['hours']}"),
        ("range", f"{_short(about['first'])} to {_short(about['last'])} UTC"),
        ("decision bars", f"{about['decision_bars']:,}, on the others the features warm up"),
        ("sessions", f"{sessions['count']:,}, trade dates {sessions['first']} to {sessions['last']}"),
        ("volume", f"{about['volume']:,.0f} contracts" if about["volume"] else "none"),
        ("quotes", "none" if quotes is None else _told_quotes(quotes)),
    ]
    if about["columns"]:
        columns = ", ".join(f"{name} {share:.1%}" for name, share in about["columns"].items())
        facts.append(("further columns", f"{columns} of the bars"))
    yield _facts("Market", facts)

    rolled = zip([None, *about["contracts"]], about["contracts"], strict=False)
    yield _table(
        "Contracts and rolls",
        ("first session", "roll", "gap g", "last session", ">bars"),
        [
            (
                own["first_session"],
                f"{old['contract']} → {own['contract']}" if old else own["contract"],
                "" if own["roll"] is None else "unmeasured" if own["gap"] is None else f"{own['gap']:+.2f}",
                own["last_session"],
                f"{own['bars']:,}",
            )
            for old, own in rolled
        ],
    )

    halt, late = sessions["halt_seen"], sessions["after_16_00_seen"]
    facts = [("weekdays closed", _listed(sessions["closed_weekdays"]))]
    facts += [
        (f"close {early['close']}", f"{_listed(early['sessions'])}; last bars end {', '.join(early['last_bar_ends'])}")
        for early in sessions["early_closes"]
    ]
    facts += [
        ("halt 15:15–15:30", "not seen" if halt is None else _told_span(halt)),
        ("bars after 16:00", "none" if late is None else _told_span(late)),
        ("sessions missing", _listed(sessions["missing"])),
        (
            "sessions short",
            _listed([f"{s['session']} {s['first'][11:16]}–{s['last'][11:16]}" for s in sessions["short"]]),
        ),
        ("short at a roll", f"{len(sessions['short_at_roll'])}"),
    ]
    yield _facts("Sessions (clock times of Chicago, those of short sessions UTC)", facts)

    least = _duration(gaps["least_s"] * 1e9)
    for name, title in (
        ("in_sessions", f"Gaps inside sessions, of {least} or more of trading time"),
        ("beside_breaks", f"Gaps beside breaks, of {least} or more of trading time"),
        ("at_rolls", "Gaps at rolls"),
        ("breaks", "Breaks between sessions"),
    ):
        found = gaps[name]
        listed = () if name == "at_rolls" else found["longest"]
        yield _table(
            f"{title}: {found['count']:,}, {_duration(found['trading_s'] * 1e9)} of trading time in all",
            ("from, UTC", "to", ">length", ">trading time"),
            [
                (_short(gap["from"]), _short(gap["to"]), *(_duration(gap[k] * 1e9) for k in ("wall_s", "trading_s")))
                for gap in listed
            ],
        )

    most = [f"{entry['session']} {_duration(entry['trading_s'] * 1e9)}" for entry in gaps["in_sessions"]["most"]]
    yield _facts("Sessions that lack the most trading time", [("", ", ".join(most) or "none")])

    yield _facts(
        "Extremes (UTC, points)",
        [
            ("limit-locked bars", f"{locked['up']} up, {locked['down']} down; sessions {_listed(locked['sessions'])}"),
            ("flat bars", f"{flat['count']:,} with high = low"),
            *[
                ("flat run", f"{run['bars']} bars at {run['price']:.2f}, {_short(run['from'])} to {_short(run['to'])}")
                for run in flat["longest_runs"]
            ],
            *[("range", f"{entry['range']:.2f} on {_short(entry['at'])}") for entry in about["largest_ranges"]],
            *[
                ("move", f"{entry['move']:+.2f} on {_short(entry['at'])}{', over a break' * entry['after_break']}")
                for entry in about["largest_moves"]
            ],
        ],
    )

    told = [entry for entry in about["quality"] if entry["count"]]
    rest = len(about["quality"]) - len(told)
    yield _table(
        f"Quality ({rest} further checks found nothing)",
        (">count", "of what", "first"),
        [(f"{entry['count']:,}", entry["words"], entry["first"] or "") for entry in told],
    )

    kinds: dict[str, list[str]] = {}
    for feature in about["features"]:
        kinds.setdefault(feature["parity"], []).append(feature["name"])
    yield _facts(
        f"Features: {len(about['features'])}", [(kind, ", ".join(names)) for kind, names in sorted(kinds.items())]
    )


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(width=20)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return _titled(title, table)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), show_header=bool(rows))
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return _titled(title, table)


def _titled(title: str, table: RenderableType) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


def _told_quotes(quotes: Mapping[str, Any]) -> str:
    return (
        f"{quotes['two_sided_share']:.1%} of the bars close with a two-sided one ({quotes['two_sided']:,}); "
        f"{quotes['one_sided']:,} one-sided, {quotes['crossed']:,} crossed, {quotes['none']:,} without"
    )


def _told_span(span: Mapping[str, Any]) -> str:
    return f"seen in {span['sessions']:,} sessions, {span['first']} to {span['last']}"


def _listed(days: Sequence[str]) -> str:
    return f"{len(days)}: {', '.join(days)}" if days else "none"


def _short(iso: str) -> str:
    return iso.replace("T", " ").removesuffix("Z").removesuffix(":00")


def _duration(ns: float) -> str:
    seconds = round(ns / 1e9)
    days, seconds = divmod(seconds, 86_400)
    clock = f"{seconds // 3_600:02d}:{seconds // 60 % 60:02d}" + (f":{seconds % 60:02d}" if seconds % 60 else "")
    return f"{days} d {clock}" if days else clock


# --- The chart --------------------------------------------------------------------------------------------------------


def draw_chart(market: Market, path: str | Path) -> None:
    """Draw closes with roll marks, volume a session where there is any, and gaps to a PNG of 1200 × 700 pixels.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    bars = market.bars
    time = market.ts.astype("datetime64[ns]")
    first, _ = _session_rows(market)
    volume = np.add.reduceat(np.nan_to_num(bars.volume), first)
    panels = [3.0, 1.0, 1.0] if volume.any() else [3.0, 1.0]
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=panels)

    prices = axes[0]
    starts = np.flatnonzero(np.diff(market.instrument, prepend=-1))
    for number, (begin, end) in enumerate(zip(starts, np.append(starts[1:], len(market)), strict=True)):
        step = -(-len(market) // _CHART_POINTS)
        rows = np.arange(begin, end, step)
        last = np.append(rows[1:], end) - 1
        color = f"C{number % 2}"
        low, high = np.minimum.reduceat(bars.low[:end], rows), np.maximum.reduceat(bars.high[:end], rows)
        prices.fill_between(time[last], low, high, color=color, alpha=0.3, linewidth=0)
        prices.plot(time[last], bars.close[last], color=color, linewidth=0.8)
        if market.roll[begin] != dynamics.NO_ROLL:
            prices.axvline(time[begin], color="0.6", linewidth=0.6, linestyle=":")
        if len(starts) <= _CHART_NAMES:
            prices.annotate(
                market.instruments[market.instrument[begin]], (time[begin], 1.0), (2, -2),
                xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7, va="top", color=color,
            )  # fmt: skip
    rolls = int(np.count_nonzero(market.roll))
    prices.set_ylabel("close, points", fontsize=8)
    prices.set_title(
        f"{market.contract.name}, {len(market):,} bars of {_interval(market)}"
        + (f", {rolls} roll{'s' * (rolls > 1)} (dotted)" if rolls else ""),
        fontsize=10, loc="left",
    )  # fmt: skip

    day = market.session[first].astype("datetime64[D]")
    if len(panels) == 3:
        axes[1].vlines(day, 0.0, volume, color="0.4", linewidth=np.clip(800 / len(day), 0.8, 12.0))
        axes[1].set_ylim(0.0)
        axes[1].set_ylabel("volume\na session", fontsize=8)
        axes[1].yaxis.set_major_formatter(EngFormatter(sep=""))

    gaps = _gaps(market)
    shown = np.flatnonzero(gaps["trading"] >= _least_gap(market))
    minutes = gaps["trading"][shown] / 60e9
    axes[-1].set_ylabel("trading time without\na bar, minutes", fontsize=8)
    if len(shown):
        largest = _largest(minutes, _CHART_POINTS)
        axes[-1].set_yscale("log")
        at = gaps["from"][shown[largest]].astype("datetime64[ns]")
        colors = np.where(gaps["roll"][shown[largest]], "0.7", "C3")
        axes[-1].vlines(at, minutes.min() / 2, minutes[largest], color=colors, linewidth=0.8)
        axes[-1].minorticks_off()
        axes[-1].set_ylim(minutes.min() / 2, minutes.max() * 2)
    else:
        axes[-1].set_yticks([])
        axes[-1].text(0.5, 0.5, "none", transform=axes[-1].transAxes, ha="center", va="center", color="0.4")
    locator = AutoDateLocator()
    axes[-1].xaxis.set_major_locator(locator)
    axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.margins(x=0.01)
    write_atomic(path, lambda partial: FigureCanvasAgg(figure).print_png(str(partial)))
