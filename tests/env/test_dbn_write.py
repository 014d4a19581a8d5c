"""DBN files as Fox writes them, read back by Databento's own library, field by field."""

from __future__ import annotations

import datetime as dt
import warnings

import numpy as np
import pytest
from databento import DBNStore
from databento_dbn import ErrorMsg, SType, SymbolMappingMsg, SystemMsg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fox_env.data.bars import Bars
from fox_env.data.dbn import BOOK_SCHEMAS, SCHEMAS
from fox_env.data.dbn_write import (
    UNDEF_PRICE,
    book_levels,
    book_records,
    definition_records,
    from_books,
    new_records,
    ohlcv_records,
    record_dtype,
    trade_records,
    write_dbn,
    write_live,
    write_ohlcv,
    write_synthetic,
)

DAY = 86_400_000_000_000
MONDAY = int(np.datetime64("2024-03-04T14:30", "ns").astype(np.int64))


def clock_of(schema):
    return "ts_event" if schema.startswith("ohlcv") else "ts_recv"


def noise(schema, count, seed=0, version=3, start=MONDAY, step=1_234_567_891):
    """Records of random bytes in every field but the header and the clock: odd nanoseconds, undefined prices, flags."""
    rng = np.random.default_rng(seed)
    records = new_records(schema, count, version=version)
    for name in records.dtype.names[4:]:
        kind = records.dtype[name]
        if kind.kind == "S":
            records[name] = b"T" if kind.itemsize == 1 else b"ES"
        else:
            raw = rng.integers(0, 256, (count, kind.itemsize), dtype=np.uint8)
            records[name] = raw.view(kind).ravel()
    for name in records.dtype.names:
        if "px" in name or name in ("open", "close", "price"):
            records[name][::3] = UNDEF_PRICE
    records[clock_of(schema)] = start + step * np.arange(count) + 1
    return records


def read(path):
    store = DBNStore.from_file(path)
    return store, store.to_ndarray()


def frame(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DBNStore.from_file(path).to_df()


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("ending", ["dbn", "dbn.zst"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_and_version_comes_back_to_the_byte(tmp_path, schema, ending, version):
    near, far = noise(schema, 50, 0, version), noise(schema, 30, 1, version, start=MONDAY + 7)
    path = tmp_path / f"some.{ending}"
    count = write_dbn(path, schema, {"ESH24": near, "ESM24": far}, version=version)
    store, records = read(path)
    assert count == len(records) == 80
    assert (store.metadata.version, str(store.metadata.schema), store.metadata.dataset) == (
        version,
        schema,
        "GLBX.MDP3",
    )
    assert store.metadata.symbols == ["ES.FUT"]
    time = records[clock_of(schema)].astype(np.int64)
    assert (np.diff(time) >= 0).all()
    for identifier, part in ((1, near), (2, far)):
        part = part.copy()
        part["instrument_id"] = identifier
        assert records[records["instrument_id"] == identifier].tobytes() == part.tobytes()
    zstd = path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert zstd == (ending == "dbn.zst")


def test_the_frame_has_symbols_prices_and_nanoseconds(tmp_path):
    ts = MONDAY + np.array([1, 3, 1_000_000_007])
    records = trade_records(ts, [5000.25, np.nan, 5000.5], [1, 2, 3], np.array([b"B", b"N", b"A"]), ts_event=ts - 99)
    write_dbn(tmp_path / "t.dbn.zst", "trades", {"ESH24": records})
    got = frame(tmp_path / "t.dbn.zst")
    assert got.index.as_unit("ns").astype("int64").tolist() == ts.tolist()
    assert got["ts_event"].dt.as_unit("ns").astype("int64").tolist() == (ts - 99).tolist()
    assert got["symbol"].tolist() == ["ESH4"] * 3
    np.testing.assert_array_equal(got["price"], [5000.25, np.nan, 5000.5])
    assert got["side"].tolist() == ["B", "N", "A"]
    assert got["action"].tolist() == ["T"] * 3
    assert got["size"].tolist() == [1, 2, 3]


def test_an_instrument_id_can_be_another_symbol_on_a_later_date(tmp_path):
    march, december = MONDAY, int(np.datetime64("2024-12-02T15:00", "ns").astype(np.int64))
    contracts = {"ESH24": noise("trades", 3, start=march), "ESZ24": noise("trades", 2, start=december)}
    intervals = {
        "ESH24": [(118, "2024-03-01", "2024-03-04"), (118, dt.date(2024, 3, 4), "2024-06-01")],
        "ESZ24": [(118, "2024-06-01", "2025-01-01")],
    }
    write_dbn(tmp_path / "t.dbn", "trades", contracts, intervals=intervals)
    got = frame(tmp_path / "t.dbn")
    assert got["symbol"].tolist() == ["ESH4"] * 3 + ["ESZ4"] * 2
    assert set(got["instrument_id"]) == {118}
    metadata = DBNStore.from_file(tmp_path / "t.dbn").metadata
    assert metadata.start == np.datetime64("2024-03-01", "ns").astype(int)
    assert metadata.end == np.datetime64("2025-01-01", "ns").astype(int)
    assert len(metadata.mappings["ESH4"]) == 2


def test_a_contract_can_change_its_id_inside_one_array(tmp_path):
    records = noise("trades", 4, step=DAY)
    intervals = {"ESH24": [(5, "2024-03-01", "2024-03-06"), (9, "2024-03-06", "2024-04-01")]}
    write_dbn(tmp_path / "t.dbn", "trades", {"ESH24": records}, intervals=intervals)
    assert read(tmp_path / "t.dbn")[1]["instrument_id"].tolist() == [5, 5, 9, 9]  # March 4, 5, 6, 7


@pytest.mark.parametrize(
    ("symbol", "stype", "symbols", "keys"),
    [
        ("ES.FUT", "parent", ["ES.FUT"], {"ESH4", "ESH4-ESM4", "ESM4"}),
        ("ES.c.0", "continuous", ["ES.c.0"], {"ES.c.0"}),
        ("", "raw_symbol", ["ESH4", "ESH4-ESM4", "ESM4"], {"ESH4", "ESH4-ESM4", "ESM4"}),
    ],
)
def test_symbology(tmp_path, symbol, stype, symbols, keys):
    names = ("ESH24", "ESH4-ESM4", "ESM24")
    contracts = {name: noise("trades", 2, start=MONDAY + k * DAY, step=5) for k, name in enumerate(names)}
    write_dbn(tmp_path / "t.dbn", "trades", contracts, symbol=symbol)
    metadata = DBNStore.from_file(tmp_path / "t.dbn").metadata
    assert (str(metadata.stype_in), metadata.symbols, set(metadata.mappings)) == (stype, symbols, keys)
    if symbol == "ES.c.0":
        rows = metadata.mappings["ES.c.0"]
        assert [(row["start_date"].day, row["end_date"].day, row["symbol"]) for row in rows] == [
            (4, 5, "1"), (5, 6, "2"), (6, 7, "3"),
        ]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streams_of_any_pieces_are_merged_in_order(tmp_path, data):
    contracts, streams = {}, {}
    for k in range(data.draw(st.integers(1, 3))):
        gaps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        records = noise("trades", len(gaps), k)
        records["ts_recv"] = MONDAY + np.cumsum(gaps)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(gaps)), max_size=4)))
        contracts[f"C{k}"] = records
        streams[f"C{k}"] = iter(np.split(records, cuts))
    intervals = {name: [(k, "2024-03-04", "2024-03-05")] for k, name in enumerate(streams, start=1)}
    write_dbn(tmp_path / "t.dbn", "trades", streams, intervals=intervals)
    got = read(tmp_path / "t.dbn")[1]
    assert len(got) == sum(map(len, contracts.values()))
    assert (np.diff(got["ts_recv"].astype(np.int64)) >= 0).all()
    for k, records in enumerate(contracts.values(), start=1):
        records["instrument_id"] = k
        assert got[got["instrument_id"] == k].tobytes() == records.tobytes()


def test_bars_and_their_ties_keep_the_order_of_the_contracts(tmp_path):
    start = MONDAY + 60_000_000_000 * np.arange(4)
    price = np.array([5000.0, 5000.25, np.nan, 1e-9])
    near = Bars(start, start + 60_000_000_000, price, price, price, price, np.array([1.0, 2.0, 3.0, 4e9]))
    far = near.take(slice(1, 3))
    assert write_ohlcv(tmp_path / "b.dbn", {"ESH24": near, "ESM24": far}) == 6
    store, records = read(tmp_path / "b.dbn")
    assert records["instrument_id"].tolist() == [1, 1, 2, 1, 2, 1]
    own = records[records["instrument_id"] == 1]
    assert own["ts_event"].tolist() == start.tolist()
    assert own["close"].tolist() == [5_000_000_000_000, 5_000_250_000_000, UNDEF_PRICE, 1]
    assert own["volume"].tolist() == [1, 2, 3, 4_000_000_000]
    assert (store.metadata.start, store.metadata.end) == (start[0], start[-1] + 60_000_000_000)


def test_a_failing_source_leaves_no_file_and_the_old_one_whole(tmp_path):
    path = tmp_path / "t.dbn"
    write_dbn(path, "trades", {"ESH24": noise("trades", 3)})
    before = path.read_bytes()

    def source():
        yield noise("trades", 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_dbn(path, "trades", {"ESH24": source()}, intervals={"ESH24": [(1, "2024-03-04", "2024-03-05")]})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.dbn"]


def test_bad_arguments_are_named(tmp_path):
    path, good = tmp_path / "t.dbn", noise("trades", 3)
    whole = {"ESH24": [(1, "2024-03-04", "2024-03-05")]}
    cases = [
        (("trade", {"ESH24": good}), {}, "schema 'trade' is unknown, expected one of ohlcv-1s"),
        (("trades", {"ESH24": good}), {"version": 4}, "version is 4, expected a DBN version"),
        (("trades", {}), {}, "no records to write"),
        (("trades", {"ESH24": good[:0]}), {}, "no records to write"),
        (("trades", {"ESH24": good[::-1]}), {}, "'ESH24' are out of order, expected them by ts_recv"),
        (("trades", {"ESH24": iter([good[1:], good[:1]])}), {"intervals": whole}, "'ESH24' are out of order"),
        (("trades", {"ESH24": iter([good])}), {}, "'ESH24' comes in parts, so its intervals must be given"),
        (("trades", {"ESH24": good, "ESM24": good}), {"intervals": whole}, "intervals has no row of 'ESM24'"),
        (("trades", {"E" * 22: good}), {"version": 1}, "is too long, expected at most 21 characters in DBN 1"),
        (("mbp-1", {"ESH24": good}), {}, "'ESH24' have 48 bytes each, expected the layout of record_dtype"),
        (("definition", {"ESH24": noise("definition", 1)}), {"version": 1}, "'ESH24' have 520 bytes each"),
        (
            ("trades", {"ESH24": good}),
            {"intervals": {"ESH24": [(1, "2024-03-05", "2024-03-06")]}},
            "'ESH24' has a record on 2024-03-04, outside its intervals",
        ),
    ]
    for arguments, options, words in cases:
        with pytest.raises(ValueError, match=words):
            write_dbn(path, *arguments, **options)
        assert not path.exists()
    with pytest.raises(ValueError, match="no bars to write"):
        write_ohlcv(path, {})
    with pytest.raises(ValueError, match="schema 'trades' is unknown, expected one of ohlcv"):
        write_ohlcv(path, {}, schema="trades")
    with pytest.raises(ValueError, match="schema 'definition' cannot be made"):
        write_synthetic(path, "planted", 10, schema="definition")
    with pytest.raises(ValueError, match="'trades' holds no books"):
        book_records("trades", *np.zeros((5, 1)))
    with pytest.raises(ValueError, match="bid has 2 levels, expected at most the 1 of mbp-1"):
        book_records("mbp-1", np.zeros(1), *np.zeros((4, 1, 2)))


@pytest.mark.parametrize("schema", BOOK_SCHEMAS)
def test_books(tmp_path, schema):
    bid, ask = np.array([[10.0], [np.nan]]), np.array([[10.25], [10.5]])
    made = book_records(
        schema,
        MONDAY + np.array([1, 2]),
        bid,
        ask,
        [[3], [0]],
        [[4], [5]],
        side=b"B",
        price=10.0,
        size=7,
        sequence=[8, 9],
    )
    write_dbn(tmp_path / "b.dbn", schema, {"ESH24": made})
    got = read(tmp_path / "b.dbn")[1]
    assert got["bid_px_00"].tolist() == [10_000_000_000, UNDEF_PRICE]
    assert got["ask_px_00"].tolist() == [10_250_000_000, 10_500_000_000]
    assert got["bid_sz_00"].tolist() == [3, 0]
    assert got["bid_ct_00"].tolist() == [1, 0]
    assert got["ask_sz_00"].tolist() == [4, 5]
    assert got["price"].tolist() == [10_000_000_000] * 2
    assert (got["size"].tolist(), got["sequence"].tolist(), got["flags"].tolist()) == ([7, 7], [8, 9], [130, 130])
    if schema == "mbp-10":  # the levels that were not given are empty
        levels = book_levels(got)
        assert levels.shape == (2, 10)
        assert (levels["ask_px"][:, 1:] == UNDEF_PRICE).all()
        assert not levels["ask_sz"][:, 1:].any()
        assert got["bid_px_09"].tolist() == levels["bid_px"][:, 9].tolist()


def books():
    """Seven events of one instrument: (second, action, depth, price)."""
    events = [
        (0.2, b"A", 0, 99.0), (0.9, b"T", 0, 100.0), (1.0, b"C", 3, 99.0), (1.4, b"M", 0, 99.5),
        (3.999999999, b"T", 0, 100.5), (4.0, b"A", 0, 99.5), (61.0, b"C", 1, 99.0),
    ]  # fmt: skip
    second, action, depth, price = map(np.array, zip(*events, strict=True))
    midnight = MONDAY // DAY * DAY
    ts = midnight + np.rint(second * 1e9).astype(np.int64)
    level = price[:, None] - np.arange(10)
    made = book_records(
        "mbp-10", ts, level, level + 1, np.full((7, 10), 5), np.arange(70).reshape(7, 10) + 1,
        action=action, depth=depth, price=price, size=1, side=b"A", ts_event=ts - 5, sequence=np.arange(7),
    )  # fmt: skip
    return midnight, made


@pytest.mark.parametrize("cuts", [[], [1], [2], [3, 3, 4], [1, 2, 3, 4, 5, 6]])
def test_thinner_schemas_of_mbp_10(cuts):
    midnight, made = books()

    def thin(schema):
        parts = list(from_books(schema, np.split(made, cuts)))
        assert all(part.dtype == record_dtype(schema) for part in parts)
        return np.concatenate(parts)

    assert thin("mbp-10").tobytes() == made.tobytes()
    assert thin("trades")["sequence"].tolist() == [1, 4]
    assert thin("trades")["rtype"].tolist() == [0, 0]
    assert thin("tbbo")["ask_sz_00"].tolist() == [11, 41]
    assert thin("mbp-1")["sequence"].tolist() == [0, 1, 3, 4, 5]  # a change at depth 1 or 3 is none of the first level
    assert thin("mbp-1")["rtype"].tolist() == [1] * 5
    # [0, 1) ends with the trade at .9, [1, 2) with 1.4, [3, 4) with 3.999…, [4, 5) with 4.0, [61, 62) with 61.0.
    sampled = thin("bbo-1s")
    assert ((sampled["ts_recv"].astype(np.int64) - midnight) / 1e9).tolist() == [1, 2, 4, 5, 62]
    assert sampled["ask_sz_00"].tolist() == [11, 31, 41, 51, 61]
    assert sampled["price"].tolist() == [100_000_000_000] * 2 + [100_500_000_000] * 3  # the last trade's
    assert (
        sampled["ts_event"].astype(np.int64).tolist() == [midnight + 899_999_995] * 2 + [midnight + 3_999_999_994] * 3
    )
    assert sampled["rtype"].tolist() == [195] * 5
    minutes = thin("bbo-1m")
    assert ((minutes["ts_recv"].astype(np.int64) - midnight) / 60e9).tolist() == [1, 2]
    assert minutes["ask_sz_00"].tolist() == [51, 61]


def test_a_quote_before_the_first_trade_has_none():
    _, made = books()
    (quote,) = np.concatenate(list(from_books("bbo-1s", [made[:1]])))
    assert (quote["price"], quote["size"], quote["side"], quote["bid_px_00"]) == (UNDEF_PRICE, 0, b"N", 99_000_000_000)
    assert not sum(map(len, from_books("bbo-1s", [made[:0]])))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_definitions(tmp_path, version):
    ts = MONDAY + DAY * np.arange(2)
    made = definition_records("ES", ["ESH24", "ESZ29", "ESH4-ESM4"], ts, version=version)
    write_dbn(tmp_path / "d.dbn.zst", "definition", made, version=version)
    got = read(tmp_path / "d.dbn.zst")[1]
    assert len(got) == 6
    near, far, spread = got[:3]
    assert [row["raw_symbol"] for row in got[:3]] == [b"ESH4", b"ESZ9", b"ESH4-ESM4"]
    assert [row["instrument_id"] for row in got[:3]] == [1, 2, 3]
    assert (near["asset"], near["currency"], near["security_type"], near["instrument_class"]) == (
        b"ES",
        b"USD",
        b"FUT",
        b"F",
    )
    assert (near["min_price_increment"], near["unit_of_measure_qty"]) == (250_000_000, 50_000_000_000)
    assert near["min_price_increment_amount"] == 125_000_000  # 12.50 dollars a tick, in the display's hundredths
    assert near["contract_multiplier"] == 2**31 - 1
    assert np.datetime64(int(near["expiration"]), "ns") == np.datetime64("2024-03-15T13:30")  # 08:30 in Chicago, DST
    assert np.datetime64(int(far["expiration"]), "ns") == np.datetime64("2029-12-21T14:30")
    assert (near["maturity_year"], near["maturity_month"], far["maturity_year"]) == (2024, 3, 2029)
    assert (spread["instrument_class"], spread["min_price_increment"]) == (b"S", 50_000_000)
    assert spread["unit_of_measure_qty"] == UNDEF_PRICE
    table = frame(tmp_path / "d.dbn.zst")
    assert table["min_price_increment"].tolist()[:3] == [0.25, 0.25, 0.05]
    assert definition_records("MES", ["MESH24"], ts)["MESH24"]["unit_of_measure_qty"].tolist() == [5_000_000_000] * 2


@pytest.mark.parametrize("name", ["ES", "ES.c.0", "ESH24-ESM24-ESU24", "E5AH4 C4000", "ESH4-"])
def test_a_definition_of_anything_else_is_refused(name):
    with pytest.raises(ValueError, match="is neither a quarterly contract"):
        definition_records("ES", [name], np.array([MONDAY]))


def test_a_live_capture_of_everything(tmp_path):
    second = 1_000_000_000
    trades = noise("trades", 20, step=second // 2)
    top = noise("mbp-1", 20, start=MONDAY + 11, step=second // 3)
    start = np.array([MONDAY])
    bars = ohlcv_records("ohlcv-1s", Bars(start, start + second, *np.full((4, 1), 9.0), np.ones(1)), instrument_id=7)
    trades["instrument_id"] = 7
    top["instrument_id"] = 8
    raw = SType.RAW_SYMBOL
    messages = [
        SystemMsg(MONDAY + 3 * second, "Heartbeat"),
        ErrorMsg(MONDAY + 4 * second, "the gateway is busy"),
        SymbolMappingMsg(0, 7, MONDAY + 9 * second, raw, "ESU4", raw, "ESU4", 2**64 - 1, 2**64 - 1),
    ]
    for name in ("l.dbn", "l.dbn.zst"):
        path = tmp_path / name
        count = write_live(path, {7: "ESH4", 8: "ESM4"}, trades, top, bars, messages=messages)
        store = DBNStore.from_file(path)
        assert store.schema is None
        kinds = [type(record).__name__ for record in store]
        assert kinds[:2] == ["SymbolMappingMsg"] * 2
        assert (len(kinds), kinds.count("SymbolMappingMsg")) == (count, 3)
        assert count == 2 + 3 + 41
        assert store.to_ndarray("trades").tobytes() == trades.tobytes()
        assert store.to_ndarray("mbp-1").tobytes() == top.tobytes()
        assert store.to_ndarray("ohlcv-1s").tobytes() == bars.tobytes()
        # The bar of the first second is sent when it is over: trades at 0 and .5 s, books at 0, .33 and .67 s before.
        assert kinds[2:7].count("OHLCVMsg") == 0
        at = kinds.index("OHLCVMsg")
        assert sum(1 for kind in kinds[2:at] if kind in ("TradeMsg", "MBP1Msg")) == 5
        assert kinds.index("SystemMsg") < kinds.index("ErrorMsg")


def test_a_live_capture_may_be_empty(tmp_path):
    assert write_live(tmp_path / "l.dbn", {}) == 0
    assert list(DBNStore.from_file(tmp_path / "l.dbn")) == []


@pytest.mark.parametrize("schema", [schema for schema in SCHEMAS if schema != "definition"])
@pytest.mark.parametrize("contracts", [False, True])
def test_a_synthetic_market_in_any_schema(tmp_path, schema, contracts):
    # Two sessions before the third Friday of March 2024, or a roll's daily bars.
    count = {"ohlcv-1d": 60, "ohlcv-1h": 300}.get(schema, 500)
    written = write_synthetic(
        tmp_path / "s.dbn.zst", "garch", count, 3, schema=schema, start="2024-03-12", contracts=contracts
    )
    store, records = read(tmp_path / "s.dbn.zst")
    assert written == len(records) >= count // 8
    assert (str(store.schema), str(store.metadata.stype_in)) == (schema, "parent" if contracts else "continuous")
    names = {"ESH4", "ESM4"} if contracts else {"ES.c.0"}
    if contracts and schema != "ohlcv-1s":  # a second's volume is too small for spreads
        names.add("ESH4-ESM4")
    assert set(store.metadata.mappings) >= names
    assert frame(tmp_path / "s.dbn.zst")["symbol"].notna().all()
    again = tmp_path / "again.dbn.zst"
    write_synthetic(again, "garch", count, 3, schema=schema, start="2024-03-12", contracts=contracts)
    assert again.read_bytes() == (tmp_path / "s.dbn.zst").read_bytes()
