"""Several schemas into one market: bars of trades, order flow, definitions, live captures; nothing of the future."""

from __future__ import annotations

import dataclasses
import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from fox_env.contracts import CONTRACTS
from fox_env.data.bars import Bars
from fox_env.data.dbn_write import (
    book_records,
    definition_records,
    from_books,
    ohlcv_records,
    trade_records,
    write_dbn,
    write_live,
    write_ohlcv,
)
from fox_env.data.features import ORDER_FLOW
from fox_env.data.load import load_market, load_segments
from fox_env.data.synthetic import books_from_bars, synthetic_bars, ticks_from_bars, traded_volume

SECOND, MINUTE = 10**9, 60 * 10**9
PRICES = ("open", "high", "low", "close")
COLUMNS = ("start", "ts", *PRICES, "volume")


def ns(clock: str) -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo("America/Chicago")).timestamp()) * SECOND


NINE = ns("2024-01-09 09:00")


def minutes(*closes, start=NINE, volume=10.0) -> Bars:
    """Flat bars of one minute at these prices."""
    price = np.array(closes, float)
    begin = start + MINUTE * np.arange(len(price))
    return Bars(begin, begin + MINUTE, price, price, price, price, np.full(len(price), volume))


def quotes(rows, schema="mbp-1"):
    """Books of (ns, bid, ask, bid size, ask size)."""
    time, bid, ask, bid_size, ask_size = (np.array(column) for column in zip(*rows, strict=True))
    return book_records(schema, time, bid.astype(float), ask.astype(float), bid_size, ask_size)


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """Half a session of ESH24 in every schema, from one synthetic tape."""
    folder = tmp_path_factory.mktemp("day")
    bars = synthetic_bars("planted", 400, seed=3, interval="1m", start="2024-01-09").bars
    books = list(books_from_bars(bars, seed=1))
    trades = list(ticks_from_bars(bars, seed=1))
    write_dbn(folder / "mbp-10.dbn.zst", "mbp-10", {"ESH24": np.concatenate(books)})
    write_dbn(folder / "trades.dbn.zst", "trades", {"ESH24": np.concatenate(trades)})
    for schema in ("mbp-1", "tbbo", "bbo-1s", "bbo-1m"):
        records = np.concatenate(list(from_books(schema, books)))
        write_dbn(folder / f"{schema}.dbn.zst", schema, {"ESH24": records})
    write_ohlcv(folder / "ohlcv-1m.dbn.zst", {"ESH24": bars})
    return folder, bars


@pytest.mark.parametrize("schema", ["trades", "tbbo", "mbp-1", "mbp-10"])
def test_every_schema_with_trades_makes_the_same_bars(day, schema):
    folder, bars = day
    segments, interval, quality, provenance = load_segments(folder / f"{schema}.dbn.zst", bars="1m")
    made = segments[0].bars
    assert (segments[0].instrument, interval, provenance["schema"]) == ("ESH24", MINUTE, schema)
    # The tape ends inside the last minute, which is therefore not over.
    assert (len(made), quality["bars_unfinished"]) == (len(bars) - 1, 1)
    for name in ("start", "ts", *PRICES):
        assert np.array_equal(getattr(made, name), getattr(bars, name)[:-1]), name
    assert np.array_equal(made.volume, traded_volume(bars)[:-1])
    assert (made.extra["ask_volume"] + made.extra["bid_volume"] <= made.volume).all()
    assert quality["trades_bad_price"] == quality["trades_closed_hours"] == 0


def test_order_flow_is_the_same_whatever_the_bars_are_made_of(day):
    folder, _ = day
    mbp10, trades = folder / "mbp-10.dbn.zst", folder / "trades.dbn.zst"
    joined = load_segments(folder / "ohlcv-1m.dbn.zst", mbp10=mbp10, trades=trades)
    alone = load_segments(mbp10, bars="1m")
    assert joined[3]["order_flow"] == {"trades": "trades", "mbp10": "mbp-10"}
    assert alone[3]["order_flow"] == {"mbp10": "mbp-10"}
    assert joined[2]["bars_volume_differs"] in (0, 1)  # a bar of few contracts has as many as its path has trades
    a, b = joined[0][0].bars.take(slice(0, -1)), alone[0][0].bars
    for name in ("bid", "ask", "bid_size", "ask_size"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert set(a.extra) == set(b.extra)
    for name in a.extra:
        assert np.array_equal(a.extra[name], b.extra[name]), name
    assert np.isfinite(a.bid).all()


def test_thin_schemas_give_what_they_show(day):
    folder, _ = day
    full = load_segments(folder / "ohlcv-1m.dbn.zst", mbp10=folder / "mbp-10.dbn.zst")[0][0].bars
    best = load_segments(folder / "ohlcv-1m.dbn.zst", mbp10=folder / "mbp-1.dbn.zst")[0][0].bars
    sampled = load_segments(folder / "ohlcv-1m.dbn.zst", mbp10=folder / "bbo-1m.dbn.zst")[0][0].bars
    assert np.array_equal(best.bid, full.bid)
    assert np.array_equal(best.extra["ofi_1"], full.extra["ofi_1"])
    assert "ofi_5" not in best.extra
    # A sample stamped at the bar's end is the state at its close.
    assert np.array_equal(sampled.ask, full.ask)
    assert np.array_equal(sampled.extra["imbalance_1"], full.extra["imbalance_1"])
    # What happened between two samples is not known.
    assert not [name for name in sampled.extra if name.startswith(("ofi", "depth"))]


def test_a_market_with_order_flow(day):
    folder, _ = day
    market = load_market(folder / "ohlcv-1m.dbn.zst", mbp10=folder / "mbp-10.dbn.zst", trades=folder / "trades.dbn.zst")
    assert set(ORDER_FLOW) <= set(market.feature_names)
    assert np.isfinite(market.features).all()
    quoted = load_market(folder / "ohlcv-1m.dbn.zst", mbp10=folder / "bbo-1s.dbn.zst")
    assert {"spread", "depth_imbalance_1", "microprice_offset"} <= set(quoted.feature_names)
    assert not {"ofi_1", "depth_imbalance_5", "trade_imbalance"} & set(quoted.feature_names)
    assert not set(ORDER_FLOW) & set(load_market(folder / "ohlcv-1m.dbn.zst").feature_names)


def test_the_directory_of_everything_is_one_market(day):
    folder, bars = day
    segments, _, _, provenance = load_segments(folder)
    assert (provenance["schema"], provenance["order_flow"]) == ("ohlcv-1m", {"trades": "trades", "mbp10": "mbp-10"})
    assert np.array_equal(segments[0].bars.close, bars.close)
    volume_bars = load_segments(folder, bars="vol:5000")
    assert (volume_bars[1], volume_bars[3]["schema"]) == (0, "trades")
    assert (volume_bars[0][0].bars.volume >= 5000).all()


SCRAMBLED = [("ohlcv-1m", "1m"), ("trades", "1m"), ("trades", "vol:500"), ("mbp-10", "vol:500")]


@pytest.mark.parametrize(("price", "spec"), SCRAMBLED)
def test_nothing_of_the_future_is_in_any_feature(day, tmp_path, price, spec):
    """Every record after t becomes garbage; what was known at t stays bit for bit."""
    folder, bars = day
    now = int(bars.ts[250]) - 1
    rng = np.random.default_rng(0)
    flow = {"mbp10": "mbp-10", "trades": "trades"}

    def market(place):
        paths = {name: place / f"{schema}.dbn.zst" for name, schema in flow.items()}
        return load_market(place / f"{price}.dbn.zst", bars=spec, **paths)

    from databento import DBNStore

    for schema in {price, *flow.values()}:
        records = DBNStore.from_file(folder / f"{schema}.dbn.zst").to_ndarray().copy()
        clock = "ts_event" if schema.startswith("ohlcv") else "ts_recv"
        known = records[clock] + (MINUTE if clock == "ts_event" else 0) <= now
        for name in records.dtype.names:
            kind = name.partition("_")[2][:2]
            if name in ("open", "high", "low", "close", "price") or kind == "px":
                records[name][~known] = rng.integers(15_960, 16_040, (~known).sum()) * 250_000_000
            elif name in ("volume", "size") or kind == "sz":
                records[name][~known] = rng.integers(1, 999, (~known).sum())
            elif name == "side":
                records[name][~known] = rng.choice([b"A", b"B", b"N"], (~known).sum())
        write_dbn(tmp_path / f"{schema}.dbn.zst", schema, {"ESH24": records})
    true = market(folder)
    other = market(tmp_path)
    closed = int(np.searchsorted(true.ts, now, side="right"))
    assert closed > 150
    assert true.feature_names == other.feature_names
    assert np.array_equal(true.features[:closed], other.features[:closed])
    assert not np.array_equal(true.features[closed : closed + 50], other.features[closed : closed + 50])
    for name in ("bid", "ask", "bid_size", "ask_size"):
        assert np.array_equal(getattr(true.bars, name)[:closed], getattr(other.bars, name)[:closed])


def test_quotes_by_hand(tmp_path):
    """The quote at a close is the last before it; a one-sided book there is no quote."""
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": minutes(4000, 4001, 4002)})
    rows = [
        (NINE + 1, 3999.75, 4000.0, 5, 7),
        (NINE + MINUTE - 1, 4000.0, 4000.25, 6, 2),
        (NINE + MINUTE, 4000.75, 4001.0, 3, 3),
        (NINE + 3 * MINUTE - 1, 4002.0, np.nan, 3, 0),
    ]
    write_dbn(tmp_path / "mbp-1.dbn", "mbp-1", {"ESH24": quotes(rows)})
    bars = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "mbp-1.dbn")[0][0].bars
    assert bars.bid.tolist()[:2] == [4000.0, 4000.75]
    assert bars.ask.tolist()[:2] == [4000.25, 4001.0]
    assert bars.bid_size.tolist()[:2] == [6, 3]
    assert np.isnan([bars.bid[2], bars.ask[2]]).all()
    # Bar 0: the first record seeds. The second: the bid rose, +6; the ask rose, +7. Bar 1: rose again, +3 and +2.
    assert bars.extra["ofi_1"].tolist() == [13, 5, 0]


def test_quotes_are_unknown_where_the_books_have_a_hole_or_have_ended(tmp_path):
    """Six bars; books in the first, the second and the fifth: the others have traded at prices that no quote knows."""
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": minutes(4000, 4001, 4011, 4021, 4002, 4032)})
    rows = [(NINE + k * MINUTE + 5, 4000.0 + k, 4000.25 + k, 5, 5) for k in (0, 1, 4)]
    write_dbn(tmp_path / "mbp-1.dbn", "mbp-1", {"ESH24": quotes(rows)})
    segments, _, quality, _ = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "mbp-1.dbn")
    bars = segments[0].bars
    for name in ("bid", "ask", "bid_size", "ask_size"):
        assert np.isfinite(getattr(bars, name)).tolist() == [True, True, False, False, True, False], name
    for name in ("ofi_1", "imbalance_1", "microprice_offset", "spread_ticks"):
        assert np.isfinite(bars.extra[name]).tolist() == [True, True, False, False, True, False], name
    assert bars.bid[[0, 1, 4]].tolist() == [4000, 4001, 4004]
    assert quality["bars_book_stale"] == 3


@pytest.mark.parametrize(("schema", "known"), [("bbo-1s", 1), ("bbo-1m", 60)])
def test_a_sample_of_the_book_holds_until_the_next_is_due(tmp_path, schema, known):
    """90 bars of a second after one sample, stamped at the end of the first."""
    price = np.full(90, 4000.0)
    start = NINE + SECOND * np.arange(90)
    bars = Bars(start, start + SECOND, price, price, price, price, np.full(90, 1.0))
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": bars}, schema="ohlcv-1s")
    write_dbn(tmp_path / "bbo.dbn", schema, {"ESH24": quotes([(NINE + SECOND, 4000.0, 4000.25, 5, 5)], schema)})
    made = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "bbo.dbn")[0][0].bars
    assert np.flatnonzero(np.isfinite(made.bid)).tolist() == list(range(known + 1))


def test_volume_bars_of_one_instant_have_its_quotes(tmp_path):
    tape = trade_records(np.array([NINE, NINE, NINE + SECOND]), np.full(3, 4000.0), np.full(3, 5), b"B")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    rows = [(NINE, 3999.75, 4000.0, 5, 5), (NINE + SECOND, 4000.0, 4000.25, 5, 5)]
    write_dbn(tmp_path / "mbp-1.dbn", "mbp-1", {"ESH24": quotes(rows)})
    made = load_segments(tmp_path / "trades.dbn", bars="vol:5", mbp10=tmp_path / "mbp-1.dbn")[0][0].bars
    assert made.bid.tolist() == [3999.75, 3999.75, 4000.0]


def sessions_of(*days):
    return [minutes(4000, 4001, 4002, start=ns(f"2024-01-{day:02d} 09:00")) for day in days]


def joined(parts):
    return Bars(*(np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS))


def test_sessions_without_books_are_left_out_and_counted(tmp_path):
    days = sessions_of(9, 10, 11)
    (tmp_path / "both").mkdir()
    write_ohlcv(tmp_path / "both" / "bars.dbn", {"ESH24": joined(days)})
    book = quotes([(int(day.start[0]) + 5, 4000.0, 4000.25, 5, 5) for day in (days[0], days[2])])
    write_dbn(tmp_path / "both" / "mbp-1.dbn", "mbp-1", {"ESH24": book})
    segments, _, quality, _ = load_segments(tmp_path / "both" / "bars.dbn", mbp10=tmp_path / "both" / "mbp-1.dbn")
    assert np.array_equal(segments[0].bars.start, np.concatenate([days[0].start, days[2].start]))
    assert quality["bars_without_book"] == 3
    # Nobody asked for them to be left out.
    with pytest.raises(ValueError, match="holds mbp-1 for the sessions of 6 of 9 bars: give mbp10= to keep these"):
        load_segments(tmp_path / "both")
    other = quotes([(ns("2024-02-09 09:00"), 4000.0, 4000.25, 5, 5)])
    write_dbn(tmp_path / "both" / "mbp-1.dbn", "mbp-1", {"ESH24": other})
    assert load_segments(tmp_path / "both")[3]["order_flow"] == {}
    with pytest.raises(ValueError, match="holds no book of ESH24 in the sessions that have bars"):
        load_segments(tmp_path / "both" / "bars.dbn", mbp10=tmp_path / "both" / "mbp-1.dbn")


def test_sessions_without_trades_are_left_out_and_counted(tmp_path):
    days = sessions_of(9, 10)
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": joined(days)})
    tape = trade_records(days[1].start + 5, days[1].close, np.array([10, 10, 7]), b"B")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    segments, _, quality, _ = load_segments(tmp_path / "bars.dbn", trades=tmp_path / "trades.dbn")
    assert np.array_equal(segments[0].bars.start, days[1].start)
    assert segments[0].bars.extra["ask_volume"].tolist() == [10, 10, 7]
    assert (quality["bars_without_trades"], quality["bars_volume_differs"]) == (3, 1)
    tape["instrument_id"] = 3
    write_dbn(tmp_path / "other.dbn", "trades", {"ESM24": tape})
    with pytest.raises(ValueError, match=r"trades .*other\.dbn holds no trades of ESH24"):
        load_segments(tmp_path / "bars.dbn", trades=tmp_path / "other.dbn")


def test_a_hole_in_the_trades_is_not_a_bar_without_any(tmp_path):
    bars = minutes(4000, 4001, 4002, 4003)
    bars.volume[2] = 0
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": bars})
    tape = trade_records(bars.start[[0, 3]] + 5, bars.close[[0, 3]], np.array([10, 10]), b"A")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    made = load_segments(tmp_path / "bars.dbn", trades=tmp_path / "trades.dbn")[0][0].bars
    assert np.array_equal(made.extra["bid_volume"], [10, np.nan, 0, 10], equal_nan=True)
    assert np.array_equal(made.extra["ask_volume"], [0, np.nan, 0, 0], equal_nan=True)


def test_books_find_their_contract_by_whatever_symbol(tmp_path):
    """Bars of ES.FUT with books of ES.c.0, and the other way round: what counts is the instrument."""
    bars = minutes(4000, 4001, 4002)
    book = quotes([(at + 5, 4000.0, 4000.25, 5, 5) for at in bars.start.tolist()])
    for bar_symbol, book_symbol in (("ES.FUT", "ES.c.0"), ("ES.c.0", "ES.FUT"), ("ES.c.0", "ES.c.0"), ("", "ES.FUT")):
        write_ohlcv(tmp_path / "bars.dbn", {"ESH24": bars}, symbol=bar_symbol)
        write_dbn(tmp_path / "book.dbn", "mbp-1", {"ESH24": book}, symbol=book_symbol)
        segments = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "book.dbn")[0]
        assert segments[0].bars.bid.tolist() == [4000.0] * 3, (bar_symbol, book_symbol)


def test_a_roll_is_measured_again_where_sessions_are_left_out(tmp_path):
    """The front passes on 2024-03-13 on; books are there from the 12th on, for both contracts."""
    clock = [ns(f"2024-03-{day} 09:00") for day in (11, 12, 13, 14)]
    near = joined([minutes(4000, 4001, start=at, volume=v) for at, v in zip(clock, (9, 5, 1, 1), strict=True)])
    far = joined([minutes(4050, 4051.25, start=at, volume=v) for at, v in zip(clock, (1, 7, 9, 9), strict=True)])
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": near, "ESM24": far})
    times = [at + 5 for at in clock[1:]]
    books = {
        "ESH24": quotes([(at, 4000.0, 4000.25, 5, 5) for at in times]),
        "ESM24": quotes([(at, 4050.0, 4050.25, 5, 5) for at in times]),
    }
    write_dbn(tmp_path / "book.dbn", "mbp-1", books)
    segments, _, quality, _ = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "book.dbn")
    assert [segment.instrument for segment in segments] == ["ESH24", "ESM24"]
    assert quality["bars_without_book"] == 2
    assert segments[0].bars.start[0] == clock[1]
    assert segments[1].gap == 4051.25 - 4001
    assert segments[1].bars.start[segments[1].first] == clock[2]


def test_volume_bars_beside_bars_without_trades(tmp_path):
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": minutes(4000, 4001)})
    tape = trade_records(NINE + np.arange(4), np.full(4, 4000.0), np.full(4, 6), b"B")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    segments, interval, _, _ = load_segments(tmp_path / "bars.dbn", bars="vol:12", trades=tmp_path / "trades.dbn")
    assert interval == 0
    assert segments[0].bars.volume.tolist() == [12, 12]
    with pytest.raises(ValueError, match=r"bars\.dbn holds ohlcv-1m, of which vol:12 bars cannot be made"):
        load_segments(tmp_path / "bars.dbn", bars="vol:12")
    (tmp_path / "bars.csv").write_text(
        "time,open,high,low,close\n2024-01-09T15:00Z,1,1,1,1\n2024-01-09T15:01Z,1,1,1,1\n"
    )
    with pytest.raises(ValueError, match=r"bars 'vol:12' are made of trades, and .* holds none: give trades="):
        load_segments(tmp_path / "bars.csv", bars="vol:12")


def test_daily_bars_of_trades(tmp_path):
    rows = [ns(f"2024-01-{day} {clock}") for day, clock in (("09", "09:00"), ("09", "15:59"), ("09", "17:00"))]
    tape = trade_records(np.array(rows), np.array([4000.0, 4002.0, 4001.0]), np.array([1, 2, 3]), b"B")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    bars = load_segments(tmp_path / "trades.dbn", bars="1d")[0][0].bars
    assert (bars.open.tolist(), bars.close.tolist(), bars.volume.tolist()) == ([4000], [4002], [3])


def test_files_that_overlap_count_once(tmp_path):
    tape = trade_records(NINE + SECOND * np.arange(10), np.full(10, 4000.0), np.full(10, 1), b"B")
    # By name the later one comes first.
    write_dbn(tmp_path / "a.dbn", "trades", {"ESH24": tape[4:]})
    write_dbn(tmp_path / "b.dbn", "trades", {"ESH24": tape[:7]})
    segments, _, quality, _ = load_segments(tmp_path, bars="vol:1")
    assert segments[0].bars.start.tolist() == tape["ts_recv"].tolist()
    assert quality["trades_overlapping"] == 3


def test_trades_out_of_order_are_refused(tmp_path):
    tape = trade_records(NINE + SECOND * np.arange(100), np.full(100, 4000.0), np.full(100, 1), b"B")
    write_dbn(tmp_path / "a.dbn", "trades", {"ESH24": tape})
    data = bytearray((tmp_path / "a.dbn").read_bytes())
    head = len(data) - tape.nbytes
    records = np.frombuffer(data, tape.dtype, offset=head)
    records["ts_recv"] = records["ts_recv"][::-1].copy()
    (tmp_path / "a.dbn").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.dbn is corrupt: 99 of 100 trades are out of time order"):
        load_segments(tmp_path / "a.dbn", bars="1s")
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": minutes(4000, 4001)})
    with pytest.raises(ValueError, match=r"a\.dbn is corrupt: 99 of 100 trades are out of time order"):
        load_segments(tmp_path / "bars.dbn", trades=tmp_path / "a.dbn")


def defined(tmp_path, **changes):
    made = definition_records("ES", ["ESH24", "ESH4-ESM4"], np.array([NINE]))
    for name, value in changes.items():
        made["ESH24"][name] = value
    write_dbn(tmp_path / "definition.dbn", "definition", made)
    return tmp_path / "definition.dbn"


def test_definitions_are_compared_with_the_contract(tmp_path):
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": minutes(4000, 4001)})
    quality = load_segments(tmp_path / "bars.dbn", definitions=defined(tmp_path))[2]
    assert quality["definitions"] == 1
    assert load_segments(tmp_path)[2]["definitions"] == 1  # they lie beside the bars
    for change, match in (
        ({"min_price_increment": 500_000_000}, "with a tick of 0.5, but ES has 0.25"),
        ({"unit_of_measure_qty": 5 * 10**9}, "with dollars a point of 5.0, but ES has 50.0"),
        ({"currency": b"EUR"}, "with the currency EUR, but ES has USD"),
        (
            {"expiration": ns("2024-03-14 08:30")},
            "expiry of 2024-03-14T13:30:00 UTC, but ES has 2024-03-15T13:30:00",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            load_segments(tmp_path / "bars.dbn", definitions=defined(tmp_path, **change))
        with pytest.raises(ValueError, match=match):
            load_segments(tmp_path)
    mine = dataclasses.replace(CONTRACTS["ES"], name="mine")
    terms = defined(tmp_path)
    assert load_segments(tmp_path / "bars.dbn", definitions=terms, contract=mine)[2]["definitions"] == 1
    with pytest.raises(ValueError, match=r"with dollars a point of 50\.0, but mine has 500\.0"):
        load_segments(tmp_path, contract=dataclasses.replace(mine, multiplier=500.0))
    assert load_segments(tmp_path, contract=CONTRACTS["MES"])[2]["definitions"] == 0  # chosen for what it is
    with pytest.raises(ValueError, match="holds no definition of a ES future"):
        load_segments(tmp_path / "bars.dbn", definitions=defined(tmp_path, asset=b"NQ"))
    with pytest.raises(ValueError, match=r"holds ohlcv-1m, expected one of definition"):
        load_segments(tmp_path / "bars.dbn", definitions=tmp_path / "bars.dbn")


def test_a_live_capture(tmp_path):
    """No schema, symbols told by the stream, records of every kind among each other; the id changes its meaning."""
    bars = minutes(4000, 4001, 4002)
    tape = trade_records(NINE + 5 + MINUTE * np.arange(3), bars.close, np.full(3, 10), b"B", instrument_id=7)
    book = quotes([(at + 3, 4000.0, 4000.25, 5, 5) for at in bars.start.tolist()])
    book["instrument_id"] = 7
    from databento_dbn import UNDEF_TIMESTAMP, SType, SymbolMappingMsg, SystemMsg

    later = NINE + 10 * MINUTE
    new_name = SymbolMappingMsg(
        0, 7, later, SType.RAW_SYMBOL, "NQH4", SType.RAW_SYMBOL, "NQH4", UNDEF_TIMESTAMP, UNDEF_TIMESTAMP
    )
    lost = trade_records(np.array([later + 5]), np.array([17000.0]), np.array([1]), b"B", instrument_id=7)
    write_live(
        tmp_path / "live.dbn.zst", {7: "ESH4"}, ohlcv_records("ohlcv-1m", bars, instrument_id=7), tape, book, lost,
        messages=[new_name, SystemMsg(NINE + 1, "heartbeat")],
    )  # fmt: skip
    segments, _, quality, provenance = load_segments(tmp_path / "live.dbn.zst")
    assert (segments[0].instrument, provenance["order_flow"]) == ("ESH24", {"trades": "trades", "mbp10": "mbp-1"})
    assert segments[0].bars.close.tolist() == [4000, 4001, 4002]
    assert segments[0].bars.bid.tolist() == [4000] * 3
    traded, _, quality, _ = load_segments(tmp_path / "live.dbn.zst", bars="vol:10")
    assert traded[0].bars.close.tolist() == [4000, 4001, 4002]
    assert quality["trades_other_symbols"] == 1


def test_a_live_capture_whose_records_end_with_the_time_they_were_sent(tmp_path):
    """Each record has eight more bytes, the symbol mappings too."""
    from databento_dbn import UNDEF_TIMESTAMP, Metadata, SType, SymbolMappingMsg

    raw = SType.RAW_SYMBOL
    tape = trade_records(NINE + 5 + MINUTE * np.arange(3), np.arange(4000.0, 4003), np.full(3, 10), b"B")
    tape["instrument_id"] = 7
    mapping = SymbolMappingMsg(0, 7, NINE, raw, "ESH4", raw, "ESH4", UNDEF_TIMESTAMP, UNDEF_TIMESTAMP)
    metadata = Metadata(
        dataset="GLBX.MDP3", start=NINE, end=None, stype_in=None, stype_out=SType.INSTRUMENT_ID, schema=None,
        symbols=[], mappings=[], version=3, ts_out=True,
    )  # fmt: skip
    sent = (NINE + 9).to_bytes(8, "little")
    records = [bytes(mapping), *(row.tobytes() for row in tape)]
    content = b"".join(bytes([len(record) // 4 + 2]) + record[1:] + sent for record in records)
    (tmp_path / "live.dbn").write_bytes(bytes(metadata) + content)
    segments, *_ = load_segments(tmp_path / "live.dbn", bars="vol:10")
    assert segments[0].instrument == "ESH24"
    assert segments[0].bars.close.tolist() == [4000, 4001, 4002]


def test_sentences(tmp_path, day):
    folder, _ = day
    for arguments, match in (
        ({"path": folder / "trades.dbn.zst"}, "holds trades: say which bars to make of them, such as bars='1m'"),
        ({"path": folder / "bbo-1s.dbn.zst"}, "holds bbo-1s, expected bars or trades"),
        (
            {"path": folder / "ohlcv-1m.dbn.zst", "mbp10": folder / "trades.dbn.zst"},
            "holds trades, expected one of",
        ),
        ({"path": folder / "ohlcv-1m.dbn.zst", "trades": folder / "bbo-1s.dbn.zst"}, "expected one of trades, tbbo"),
        ({"path": folder / "ohlcv-1m.dbn.zst", "mbp10": tmp_path / "none"}, "none does not exist"),
        ({"path": folder / "trades.dbn.zst", "bars": "1m", "symbol": "NQ"}, "holds no trades of 'NQ' but of ESH4"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=match) as error:
            load_segments(**arguments)
        assert "\n" not in str(error.value)


def test_masked_books_beside_their_own_trades_are_named_by_their_path(tmp_path):
    book = quotes([(NINE + k * MINUTE, np.nan, np.nan, 0, 0) for k in range(5)])
    book["action"], book["price"], book["size"] = b"T", 4000 * 10**9, 1
    write_dbn(tmp_path / "mbp-1.dbn", "mbp-1", {"ESH24": book})
    with pytest.raises(ValueError, match=r"mbp-1\.dbn holds no book of ESH24 in the sessions that have bars"):
        load_segments(tmp_path / "mbp-1.dbn", bars="1m")


def test_trades_beside_the_bars_serve_if_every_session_has_some(tmp_path):
    days = sessions_of(9, 10)
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": joined(days)})
    clock = np.concatenate([day.start + 5 for day in days])
    tape = trade_records(clock, np.full(6, 4000.0), np.full(6, 10), b"B")
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape})
    segments, _, quality, provenance = load_segments(tmp_path)
    assert provenance["order_flow"] == {"trades": "trades"}
    assert segments[0].bars.extra["ask_volume"].tolist() == [10] * 6
    assert quality["bars_without_trades"] == 0
    # Else they are left alone: nobody asked for sessions to be left out.
    write_dbn(tmp_path / "trades.dbn", "trades", {"ESH24": tape[3:]})
    segments, _, quality, provenance = load_segments(tmp_path)
    assert (len(segments[0].bars), provenance["order_flow"], segments[0].bars.extra) == (6, {}, {})
    # Books hold the trades too.
    made = quotes([(int(at), 4000.0, 4000.25, 5, 5) for at in clock])
    made["action"], made["side"], made["price"], made["size"] = b"T", b"A", 4000 * 10**9, 10
    write_dbn(tmp_path / "trades.dbn", "mbp-1", {"ESH24": made})
    segments, _, _, provenance = load_segments(tmp_path / "bars.dbn", mbp10=tmp_path / "trades.dbn")
    assert provenance["order_flow"] == {"trades": "mbp-1", "mbp10": "mbp-1"}
    assert segments[0].bars.extra["bid_volume"].tolist() == [10] * 6
