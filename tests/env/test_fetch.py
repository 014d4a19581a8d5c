"""Downloading from Databento, against a local server that the real client talks to."""

from __future__ import annotations

import base64
import datetime as dt
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import numpy as np
import pytest
import zstandard
from databento import Historical
from databento_dbn import Metadata, Schema, SType

import fox_env
from fox_env.data import fetch
from fox_env.data.bars import Bars
from fox_env.data.calendar import sessions
from fox_env.data.dbn_write import write_ohlcv
from fox_env.data.fetch import Fetcher, Request, file_name

KEY = "db-0123456789ABCDEFGHIJKLMNOPQRS"
BASIC = base64.b64encode(f"{KEY}:".encode()).decode()
YEAR = Request("ES.FUT", "ohlcv-1h", dt.date(2023, 1, 1), dt.date(2024, 1, 1))


def month(number: int, year: int = 2023) -> str:
    first = dt.date(year, number, 1)
    return file_name(YEAR, first, (first + dt.timedelta(31)).replace(day=1))


def hours(start: dt.date, end: dt.date) -> Bars:
    """Hourly bars of each weekday's 15:00 to 21:00 UTC in [start, end); the price tells the hour."""
    days = np.arange(np.datetime64(start, "ns"), np.datetime64(end, "ns"), np.timedelta64(1, "D")).astype(np.int64)
    weekday = (days // 86_400_000_000_000 + 3) % 7
    hour = 3_600_000_000_000
    begin = np.concatenate([day + hour * np.arange(15, 21) for day in days[weekday < 5]])
    price = 4_000.0 + begin // hour % 7
    return Bars(begin, begin + hour, price, price + 1, price - 1, price, np.full(len(begin), 100.0))


def open_hours(start: dt.date, end: dt.date) -> Bars:
    """Those that are not on a holiday, which a market keeps."""
    bars = hours(start, end)
    return bars.take(sessions(bars.start, bars.ts).is_open)


class Server(ThreadingHTTPServer):
    """Serves what Databento's client asks for.

    `asked` holds (method, form) of each request; `faults` maps a method to the answers to give before good ones:
    a status, a status with a body and headers, or ``"cut"``, ``"cut quietly"``, ``"garbage"``, ``"drop"``.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.keys: Counter[str] = Counter()
        self.faults: dict[str, list] = {}
        self.body: dict[str, bytes] = {}
        self.warning = ""

    def client(self) -> Historical:
        return self.point(Historical(KEY))

    def point(self, client: Historical) -> Historical:
        """The client, to ask this server: the library takes no address that is not https."""
        for api in (client.metadata, client.timeseries):
            api._base_url = api._base_url.replace(client.gateway, f"http://127.0.0.1:{self.server_port}")
        return client

    def ranges(self, method: str) -> list[tuple[str, str]]:
        return [(form["start"], form["end"]) for asked, form in self.asked if asked == method]

    def dbn(self, form: dict[str, str]) -> bytes:
        start, end = (dt.date.fromisoformat(form[name][:10]) for name in ("start", "end"))
        if form["schema"] == "ohlcv-1h" and form["stype_in"] == "parent":
            file = self.folder / "made.dbn.zst"
            write_ohlcv(
                file, {"ESH24": hours(start, end)}, schema="ohlcv-1h", symbol=form["symbols"], dataset=form["dataset"]
            )
            return file.read_bytes()
        midnight = [int(np.datetime64(day, "ns").astype(np.int64)) for day in (start, end)]
        meta = Metadata(
            dataset=form["dataset"], start=midnight[0], end=midnight[1], stype_in=SType.from_str(form["stype_in"]),
            stype_out=SType.INSTRUMENT_ID, schema=Schema.from_str(form["schema"]), symbols=[form["symbols"]],
            mappings=[SimpleNamespace(raw_symbol=form["symbols"], intervals=[])], version=3,
        )  # fmt: skip
        return zstandard.ZstdCompressor().compress(bytes(meta))


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        form = {k: v[0] for k, v in parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).items()}
        method = self.path.rpartition("/")[2]
        self.server.asked.append((method, form))
        self.server.keys[self.headers["Authorization"]] += 1
        assert self.path == f"/v0/{method}"
        faults = self.server.faults.get(method)
        fault = faults.pop(0) if faults else None
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int | tuple):
            status, body, headers = fault if isinstance(fault, tuple) else (fault, {"detail": f"fault {fault}"}, {})
            self.reply(status, json.dumps(body).encode(), **headers)
        elif method.startswith("metadata"):
            days = (dt.date.fromisoformat(form["end"][:10]) - dt.date.fromisoformat(form["start"][:10])).days
            values = {"get_cost": days * 0.25, "get_record_count": days * 1_000, "get_billable_size": days * 56_000}
            self.reply(200, json.dumps(values[method.partition(".")[2]]).encode())
        else:
            body = self.server.body.get(form["start"][:10]) or self.server.dbn(form)
            warning = {"X-Warning": json.dumps([self.server.warning])} if self.server.warning else {}
            if fault == "garbage":
                self.reply(200, b"<html>no data here</html>" * 100)
            elif fault == "cut":
                self.reply(200, body, cut=len(body) // 2)
            elif fault == "cut quietly":  # as long as the header says, but not all of the stream
                self.reply(200, body[: len(body) // 2])
            else:
                self.reply(200, body, **warning)

    def reply(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(fetch, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    server = Server(tmp_path_factory.mktemp("server"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetched(server: Server, out: Path, request: Request = YEAR) -> list[str]:
    """Plan and download; the names of the files that came."""
    fetcher = Fetcher(server.client())
    return [piece.path.name for piece in fetcher.download(fetcher.plan(out, request))]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.rglob("*") if path.is_file())


# --- A whole download -------------------------------------------------------------------------------------------------


def test_a_year_comes_in_months_and_makes_a_market(server: Server, tmp_path: Path) -> None:
    fetcher = Fetcher(server.client())
    plan = fetcher.plan(tmp_path, YEAR)
    # 365 days at 0.25 USD, 1,000 records and 56,000 bytes each, in one question each.
    assert (plan.cost_usd, plan.records, plan.bytes, plan.whole) == (91.25, 365_000, 20_440_000, 0)
    assert Counter(method for method, _ in server.asked) == {
        f"metadata.{name}": 1 for name in ("get_cost", "get_record_count", "get_billable_size")
    }
    assert names(tmp_path) == []
    came = [piece.path for piece in fetcher.download(plan)]
    assert [path.name for path in came] == [month(number) for number in range(1, 13)]
    assert came[1] == tmp_path / "ES.FUT" / "GLBX.MDP3-ES.FUT-ohlcv-1h-2023-02-01_2023-03-01.dbn.zst"
    assert names(tmp_path) == sorted(path.name for path in came)
    # The key went out as HTTP's basic authentication, user name and no password, with each of the 15 requests.
    assert server.keys == {f"Basic {BASIC}": 15}
    form = dict(server.asked[3:])["timeseries.get_range"]
    assert {k: form[k] for k in ("dataset", "symbols", "schema", "stype_in", "encoding", "compression")} == {
        "dataset": "GLBX.MDP3", "symbols": "ES.FUT", "schema": "ohlcv-1h", "stype_in": "parent", "encoding": "dbn",
        "compression": "zstd",
    }  # fmt: skip
    market = fox_env.load_market(tmp_path, symbol="ES.FUT")
    expected = open_hours(YEAR.start, YEAR.end)
    np.testing.assert_array_equal(market.bars.start, expected.start)
    np.testing.assert_array_equal(market.bars.close, expected.close)


def test_what_is_there_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    fetched(server, tmp_path)
    folder = tmp_path / "ES.FUT"
    good = {number: (folder / month(number)).read_bytes() for number in range(1, 13)}
    (folder / month(3)).unlink()
    (folder / month(4)).write_bytes(good[4][: len(good[4]) // 2])
    (folder / month(9)).write_bytes(good[8])  # of another month
    server.asked.clear()
    fetcher = Fetcher(server.client())
    plan = fetcher.plan(tmp_path, YEAR)
    # March and April together, and September: 61 and 30 days.
    assert server.ranges("metadata.get_cost") == [("2023-03-01", "2023-05-01"), ("2023-09-01", "2023-10-01")]
    assert (plan.cost_usd, plan.records, plan.whole) == (91 * 0.25, 91_000, 9)
    assert [piece.path.name for piece in fetcher.download(plan)] == [month(3), month(4), month(9)]
    assert [start for start, _ in server.ranges("timeseries.get_range")] == ["2023-03-01", "2023-04-01", "2023-09-01"]
    assert {number: (folder / month(number)).read_bytes() for number in range(1, 13)} == good
    server.asked.clear()
    assert fetched(server, tmp_path) == []
    assert server.asked == []


def test_dates_inside_months_are_kept_when_the_range_grows(server: Server, tmp_path: Path) -> None:
    part = Request("ES.FUT", "ohlcv-1h", dt.date(2023, 1, 20), dt.date(2023, 2, 10))
    cuts = [("2023-01-20", "2023-02-01"), ("2023-02-01", "2023-02-10")]
    assert fetched(server, tmp_path, part) == [file_name(part, *cut) for cut in cuts]
    wider = Request("ES.FUT", "ohlcv-1h", dt.date(2023, 1, 1), dt.date(2023, 3, 15))
    more = [("2023-01-01", "2023-01-20"), ("2023-02-10", "2023-03-01"), ("2023-03-01", "2023-03-15")]
    assert fetched(server, tmp_path, wider) == [file_name(part, *cut) for cut in more]
    market = fox_env.load_market(tmp_path, symbol="ES.FUT")
    np.testing.assert_array_equal(market.bars.start, open_hours(wider.start, wider.end).start)
    assert market.quality["rows_duplicate"] == 0


def test_a_day_of_a_heavy_schema_is_a_file_and_a_saturday_goes_with_friday(server: Server, tmp_path: Path) -> None:
    # Thursday 2024-01-04 to Tuesday 2024-01-09; files without a record, as on a holiday, are whole.
    request = Request("ES.v.0", "mbp-10", dt.date(2024, 1, 4), dt.date(2024, 1, 9))
    cuts = [("2024-01-04", "2024-01-05"), ("2024-01-05", "2024-01-07"), ("2024-01-07", "2024-01-08"),
            ("2024-01-08", "2024-01-09")]  # fmt: skip
    assert fetched(server, tmp_path, request) == [file_name(request, *cut) for cut in cuts]
    assert {form["stype_in"] for _, form in server.asked} == {"continuous"}
    assert fetched(server, tmp_path, request) == []
    assert fetched(server, tmp_path, Request("ES.v.0", "trades", request.start, request.end)) == [
        "GLBX.MDP3-ES.v.0-trades-2024-01-04_2024-01-09.dbn.zst"
    ]


def test_a_warning_of_the_server_is_passed_on(server: Server, tmp_path: Path) -> None:
    server.warning = f"Warning: the data of 2023-01-05 are degraded, said to {KEY}"
    told: list[str] = []
    fetcher = Fetcher(server.client(), told.append)
    request = Request("ES.FUT", "ohlcv-1h", dt.date(2023, 1, 1), dt.date(2023, 2, 1))
    list(fetcher.download(fetcher.plan(tmp_path, request)))
    assert told == ["the data of 2023-01-05 are degraded, said to ***"]


# --- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", r"is cut short \(Error streaming response: .*\), so it was not kept"),
        ("cut quietly", "2023-03-01_2023-04-01.dbn.zst is cut short .*, so it was not kept"),
        ("garbage", "2023-03-01_2023-04-01.dbn.zst is not zstd .*, so it was not kept"),
    ],
)
def test_a_download_that_breaks_leaves_no_piece_and_goes_on(
    server: Server, tmp_path: Path, fault: str, words: str
) -> None:
    server.faults["timeseries.get_range"] = [None, None, fault]
    with pytest.raises((OSError, ValueError), match=words) as caught:
        fetched(server, tmp_path)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == [month(1), month(2)]  # and no hidden file
    # It is not tried again by itself, since it costs again.
    assert [start for start, _ in server.ranges("timeseries.get_range")] == ["2023-01-01", "2023-02-01", "2023-03-01"]
    assert fetched(server, tmp_path) == [month(number) for number in range(3, 13)]


def test_ctrl_c_keeps_finished_pieces(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = server.client()
    get_range, calls = client.timeseries.get_range, []

    def interrupted(**arguments: object) -> object:
        calls.append(arguments)
        store = get_range(**arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return store

    monkeypatch.setattr(client.timeseries, "get_range", interrupted)
    fetcher = Fetcher(client)
    with pytest.raises(KeyboardInterrupt):
        list(fetcher.download(fetcher.plan(tmp_path, YEAR)))
    assert names(tmp_path) == [month(1)]


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (401, "the estimate: DATABENTO_API_KEY holds a key that Databento does not know (401: fault 401)", ValueError),
        (402, "no means to pay", ValueError),
        (403, "may not have this data", ValueError),
        (404, "refuses the request (404", ValueError),
        (422, "cannot serve this request (422: fault 422)", ValueError),
        (429, "too many requests (429", OSError),
        (500, "has a fault of its own (500", OSError),
        (504, "has a fault of its own (504: The remote gateway timed out.)", OSError),
    ],
)
def test_statuses_are_sentences(server: Server, tmp_path: Path, status: int, words: str, kind: type) -> None:
    server.faults["metadata.get_cost"] = [status] * 9
    with pytest.raises(kind) as caught:
        fetched(server, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    # What may pass is asked for four times, what stays once.
    assert len(server.asked) == (4 if status in (429, 500, 504) else 1)
    assert names(tmp_path) == []


def test_databentos_own_form_of_a_refusal_is_read(server: Server, tmp_path: Path) -> None:
    detail = {"case": "symbology_invalid_request", "message": "None of the symbols\ncould be resolved", "docs": "d"}
    server.faults["metadata.get_cost"] = [(422, {"detail": detail}, {})]
    with pytest.raises(ValueError, match="symbology_invalid_request None of the symbols could be resolved"):
        fetched(server, tmp_path)


@pytest.mark.parametrize("method", ["metadata.get_cost", "metadata.get_billable_size", "timeseries.get_range"])
def test_a_passing_fault_passes(server: Server, tmp_path: Path, method: str) -> None:
    server.faults[method] = [429, 500, "drop"]
    assert len(fetched(server, tmp_path)) == 12
    assert len(server.ranges(method)) == 3 + (12 if method.startswith("time") else 1)


def test_the_wait_that_the_server_asks_for_is_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(fetch.time, "sleep", waits.append)
    monkeypatch.setattr(fetch, "RETRY_SECONDS", (1.0, 2.0, 4.0))
    server.faults["metadata.get_cost"] = [
        (429, {"detail": ""}, {"Retry-After": "30"}), 500, (503, {"detail": ""}, {"Retry-After": "900"}),
    ]  # fmt: skip
    fetched(server, tmp_path)
    assert waits == [30.0, 2.0, 60.0]


def test_no_network_is_one_sentence(server: Server, tmp_path: Path) -> None:
    client = server.client()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client.metadata._base_url = f"http://127.0.0.1:{free.getsockname()[1]}/v0/metadata"
    with pytest.raises(OSError, match=r"the estimate: Databento cannot be reached, is the network up\?"):
        Fetcher(client).plan(tmp_path, YEAR)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"schema": "ohlcv-1m"}, "has schema ohlcv-1m, expected ohlcv-1h"),
        ({"symbols": "NQ.FUT"}, r"has symbols \['NQ.FUT'\], expected \['ES.FUT'\]"),
        ({"stype_in": "raw_symbol"}, "has stype raw_symbol, expected parent"),
        ({"dataset": "XNAS.ITCH"}, "has dataset XNAS.ITCH, expected GLBX.MDP3"),
        ({"end": "2023-02-02"}, "begins or ends outside 2023-01-01 to 2023-02-01"),
        ({"start": "2022-12-30"}, "begins or ends outside 2023-01-01 to 2023-02-01"),
    ],
)
def test_what_was_not_asked_for_is_not_kept(server: Server, tmp_path: Path, held: dict[str, str], words: str) -> None:
    asked = {"dataset": "GLBX.MDP3", "symbols": "ES.FUT", "schema": "ohlcv-1h", "stype_in": "parent",
             "start": "2023-01-01", "end": "2023-02-01"}  # fmt: skip
    server.body["2023-01-01"] = server.dbn(asked | held)
    with pytest.raises(ValueError, match=f"{words}, so it was not kept"):
        fetched(server, tmp_path)
    assert names(tmp_path) == []


def test_a_stream_that_ends_inside_a_record_is_cut_short(server: Server, tmp_path: Path) -> None:
    asked = {"dataset": "GLBX.MDP3", "symbols": "ES.FUT", "schema": "ohlcv-1h", "stype_in": "parent",
             "start": "2023-01-01", "end": "2023-02-01"}  # fmt: skip
    plain = zstandard.ZstdDecompressor().stream_reader(server.dbn(asked), read_across_frames=True).read()
    half = len(plain) // 2 // 8 * 8
    compress = zstandard.ZstdCompressor().compress
    january = Request("ES.FUT", "ohlcv-1h", dt.date(2023, 1, 1), dt.date(2023, 2, 1))
    server.body["2023-01-01"] = compress(plain[:half]) + compress(plain[half:-28])
    with pytest.raises(ValueError, match="is cut short"):
        fetched(server, tmp_path, january)
    whole = len(plain) - 10 * 56  # a frame that ends with a record, and another without its end
    server.body["2023-01-01"] = compress(plain[:whole]) + compress(plain[whole:])[:-5]
    with pytest.raises(ValueError, match="is cut short"):
        fetched(server, tmp_path, january)
    server.body["2023-01-01"] = compress(plain[:half]) + compress(plain[half:])  # several frames are as good as one
    assert fetched(server, tmp_path, january) == [month(1)]


# --- Bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end": dt.date(2023, 1, 1)}, "end is 2023-01-01, expected a date after start, 2023-01-01"),
        ({"end": dt.date(2022, 1, 1)}, "end is 2022-01-01"),
        ({"schema": "ohlcv-5m"}, "schema is 'ohlcv-5m', expected one of ohlcv-1s"),
        ({"schema": "mbo"}, "schema is 'mbo'"),
        ({"symbol": "ES"}, "symbol is 'ES', a root, expected ES.FUT"),
        ({"symbol": "../ES"}, "symbol is '../ES'"),
        ({"symbol": ""}, "symbol is ''"),
        ({"dataset": "GLBX"}, "dataset is 'GLBX', expected one such as GLBX.MDP3"),
        ({"dataset": "A/../B.C"}, "dataset is"),
        ({"stype": "isin"}, "stype is 'isin', expected one of parent, continuous, raw_symbol"),
    ],
)
def test_bad_requests_are_refused(change: dict[str, object], words: str) -> None:
    arguments = {"symbol": "ES.FUT", "schema": "trades", "start": dt.date(2023, 1, 1), "end": dt.date(2024, 1, 1)}
    with pytest.raises(ValueError, match=words):
        Request(**(arguments | change))


@pytest.mark.parametrize(
    ("symbol", "stype"),
    [("ES.FUT", "parent"), ("ES.c.0", "continuous"), ("NQ.n.1", "continuous"), ("ESH4", "raw_symbol")],
)
def test_the_symbols_form_tells_its_type(symbol: str, stype: str) -> None:
    assert Request(symbol, "trades", dt.date(2023, 1, 1), dt.date(2024, 1, 1)).stype == stype
    assert Request(symbol, "trades", dt.date(2023, 1, 1), dt.date(2024, 1, 1), stype="parent").stype == "parent"


# --- The key ----------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetch.KEY_VARIABLE, KEY)
    assert Fetcher().client.key == KEY
    for missing in ("", "  "):
        monkeypatch.setenv(fetch.KEY_VARIABLE, missing)
        with pytest.raises(ValueError, match="DATABENTO_API_KEY is not set"):
            Fetcher()
    monkeypatch.delenv(fetch.KEY_VARIABLE)
    with pytest.raises(ValueError, match="DATABENTO_API_KEY is not set"):
        Fetcher()
    for bad in (KEY + "\n", KEY[:9] + "é" + KEY[9:], KEY + " "):
        monkeypatch.setenv(fetch.KEY_VARIABLE, bad)
        with pytest.raises(ValueError, match="DATABENTO_API_KEY holds") as caught:
            Fetcher()
        assert KEY[:9] not in str(caught.value)


def test_the_key_is_in_no_file_no_output_no_log_and_no_error(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    echo = {"detail": f"the key {KEY} as {BASIC} is bad"}
    for method in ("metadata.get_cost", "timeseries.get_range"):
        for status in (401, 422, 500):
            server.faults = {method: [(status, echo, {"request-id": KEY})] * 4}
            with pytest.raises((ValueError, OSError)) as caught:
                fetched(server, tmp_path)
            assert "the key *** as *** is bad" in str(caught.value)
            assert not holds_key(caught.value)
    fetched(server, tmp_path)
    assert len(names(tmp_path)) == 12
    for path in tmp_path.rglob("*"):
        assert KEY.encode() not in (path.read_bytes() if path.is_file() else b"")
    captured = capfd.readouterr()
    assert all(secret not in text for secret in (KEY, BASIC) for text in (captured.out, captured.err, caplog.text))


def holds_key(error: BaseException | None) -> bool:
    """Whether an exception, or one that it stands for, holds the key in its text, arguments or attributes."""
    if error is None:
        return False
    told = f"{error} {error!r} {error.args} {vars(error)}"
    return KEY in told or BASIC in told or holds_key(error.__cause__) or holds_key(error.__context__)


def test_importing_costs_nothing() -> None:
    code = "import sys, fox_env.data.fetch; assert not {'databento', 'requests', 'pandas'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
