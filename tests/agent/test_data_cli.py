"""``fox data``: what the commands print, write, refuse and pass on."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fox_env
from fox_agent import cli, data_cli
from fox_env.data import fetch
from fox_env.data.dbn_write import write_ohlcv
from fox_env.data.synthetic import synthetic_bars
from tests.env.test_fetch import BASIC, KEY, Server, month, names, server  # noqa: F401

YEAR = ("--symbol", "ES.FUT", "--schema", "ohlcv-1h", "--start", "2023-01-01", "--end", "2024-01-01")


def fox(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of ``fox data arguments``."""
    monkeypatch.setattr(sys, "argv", ["fox", "data", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Run ``fox data arguments``, which is to be refused, and return the sentence."""

    def run(*arguments: object) -> str:
        assert fox(monkeypatch, *arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert KEY not in captured.out + captured.err
        return captured.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def databento(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:  # noqa: F811
    """The server, to which the real client with the key of the environment goes."""
    connect = fetch.connect
    monkeypatch.setenv(fetch.KEY_VARIABLE, KEY)
    monkeypatch.setattr(fetch, "connect", lambda: server.point(connect()))
    return server


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_fetch_shows_the_cost_and_asks(databento: Server, tmp_path: Path) -> None:
    run = lambda answer, *more: CliRunner().invoke(cli.app, ["data", "fetch", str(tmp_path), *YEAR, *more], answer)  # noqa: E731
    # 365 days at 0.25 USD, 1,000 records and 56,000 bytes.
    cost = "12 files to download, 0 are there: 365,000 records, 20.4 MB uncompressed, estimated cost 91.25 USD\n"
    declined = run("n\n")
    assert declined.exit_code == 1
    assert declined.stdout == f"{cost}Download? [y/N]: n\n"
    assert run("").exit_code == 1  # no one there to ask
    assert names(tmp_path) == []
    assert databento.ranges("timeseries.get_range") == []

    agreed = run("y\n")
    assert agreed.exit_code == 0
    assert agreed.stdout == f"{cost}Download? [y/N]: y\n12 files in {tmp_path}/ES.FUT\n"
    assert names(tmp_path) == [month(number) for number in range(1, 13)]
    assert set(databento.keys) == {f"Basic {BASIC}"}

    asked = len(databento.asked)
    assert run("").stdout == f"all 12 files are in {tmp_path}/ES.FUT\n"
    assert len(databento.asked) == asked

    (tmp_path / "ES.FUT" / month(7)).unlink()
    assert run("", "--yes").stdout == (
        "1 files to download, 11 are there: 31,000 records, 1.7 MB uncompressed, estimated cost 7.75 USD\n"
        f"1 files in {tmp_path}/ES.FUT\n"
    )


def test_ctrl_c_in_fetch_keeps_what_is_whole(
    databento: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stream = fetch.Fetcher._stream

    def interrupted(self: fetch.Fetcher, partial: Path, arguments: dict[str, object]) -> str:
        told = stream(self, partial, arguments)
        if len(databento.ranges("timeseries.get_range")) == 3:
            raise KeyboardInterrupt
        return told

    monkeypatch.setattr(fetch.Fetcher, "_stream", interrupted)
    assert fox(monkeypatch, "fetch", tmp_path, *YEAR, "--yes") == 130
    assert "stopped after 2 of 12 files; the same command goes on" in capsys.readouterr().out
    assert names(tmp_path) == [month(1), month(2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--end", "2023-01-01"], "end is 2023-01-01, expected a date after start"),
        (["--schema", "ohlcv-5m"], "schema is 'ohlcv-5m'"),
        (["--symbol", "ES"], "symbol is 'ES', a root"),
        (["--start", "January"], "--start is 'January', expected a date such as 2023-01-31"),
        (["--end", "2023-02-30"], "--end is '2023-02-30'"),
        (["--stype", "isin"], "stype is 'isin'"),
        (["--dataset", "CME"], "dataset is 'CME'"),
    ],
)
def test_bad_options_of_fetch_send_nothing(
    databento: Server, refused, tmp_path: Path, options: list[str], words: str
) -> None:
    assert words in refused("fetch", tmp_path, *YEAR, *options)
    assert databento.asked == []


def test_fetch_without_a_key_sends_nothing(databento: Server, refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(fetch.KEY_VARIABLE)
    assert "DATABENTO_API_KEY is not set" in refused("fetch", tmp_path, *YEAR)
    assert databento.asked == []


@pytest.mark.parametrize("method", ["metadata.get_record_count", "timeseries.get_range"])
@pytest.mark.parametrize("fault", [401, 422, 429, 500, "cut", (403, {"detail": f"{KEY} {BASIC}"}, {"request-id": KEY})])
def test_what_the_server_refuses_is_one_sentence(
    databento: Server, refused, tmp_path: Path, method: str, fault: object
) -> None:
    if fault == "cut" and method.startswith("metadata"):
        fault = "drop"
    databento.faults[method] = [fault] * 4
    sentence = refused("fetch", tmp_path, *YEAR, "--yes")
    assert KEY not in sentence
    assert BASIC not in sentence
    assert names(tmp_path) == []


# --- info and build ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two weeks of five-minute bars, as a CSV without a zone."""
    file = tmp_path_factory.mktemp("bars") / "ES.csv"
    made = synthetic_bars("garch", 2_500, 0).bars
    stamps = np.datetime_as_string(made.start.astype("datetime64[ns]"), unit="s")
    columns = zip(stamps, made.open, made.high, made.low, made.close, made.volume, strict=True)
    file.write_text("\n".join(["when,open,high,low,last,volume", *(",".join(map(str, row)) for row in columns)]))
    return file


LOAD = ("--tz", "UTC", "--columns", "time=when")


def test_info_prints_draws_and_saves(
    bars: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    chart, facts = tmp_path / "c" / "chart.png", tmp_path / "facts.json"
    assert fox(monkeypatch, "info", bars, *LOAD, "--chart", chart, "--json", facts) == 0
    told = capsys.readouterr().out
    market = fox_env.load_market(bars, tz="UTC", columns={"time": "when"})
    assert told.startswith(repr(market))
    assert max(map(len, told.splitlines()[1:-2])) <= 100
    # From Tuesday, January 3rd on; on the 16th the session closes early.
    for words in ("2,500 of 5m", "Sessions", "close 12:00", "2023-01-16", "Quality", "Features", f"chart in {chart}"):
        assert words in told
    assert struct.unpack(">II", chart.read_bytes()[16:24]) == (1200, 700)
    saved = json.loads(facts.read_text())
    assert saved["bars"] == len(market) == 2_500
    assert saved["provenance"]["path"] == str(bars)


def test_build_builds_once_and_then_opens(
    bars: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    told = []
    for options in ([], [], ["--bars", "1h"]):
        assert fox(monkeypatch, "build", bars, *LOAD, *options, "--cache", cache) == 0
        told.append(capsys.readouterr().out.splitlines())
    assert [lines[1].split(" in ")[0] for lines in told] == ["built", "opened", "built"]
    assert told[0][0] == told[1][0] == repr(fox_env.load_market(bars, tz="UTC", columns={"time": "when"}))
    files = [Path(lines[1].partition(" s: ")[2].rpartition(", ")[0]) for lines in told]
    assert files[0] == files[1] != files[2]
    assert sorted(cache.glob("*.fxcache")) == sorted({*files})
    assert told[0][1].endswith(f", {files[0].stat().st_size / 1e6:,.1f} MB")


@pytest.mark.parametrize("command", ["info", "build"])
def test_every_option_of_loading_is_passed_on(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, object] = {}

    def load(path: object, **options: object) -> None:
        given.update(options, path=path)
        raise ValueError("enough")

    monkeypatch.setattr(fox_env, "load_market", load)
    assert fox(monkeypatch, command, "a*.csv", "--cache", tmp_path) == 2
    assert given == {
        "path": Path("a*.csv"), "symbol": "ES", "bars": None, "tz": None, "stamp": None, "columns": None,
        "roll": "volume", "hours": "all", "max_bars": 0, "mbp10": None, "trades": None, "definitions": None,
        "cache": tmp_path,
    }  # fmt: skip
    options = {
        "symbol": "NQ", "bars": "vol:5", "tz": "UTC", "stamp": "end", "roll": "expiry", "hours": "rth", "max_bars": 7,
        "mbp10": Path("m"), "trades": Path("t"), "definitions": Path("d"), "cache": Path("c"),
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert fox(monkeypatch, command, "x", *words, "--columns", "close=Last", "--columns", "time=0") == 2
    assert given == options | {"path": Path("x"), "columns": {"close": "Last", "time": 0}}
    assert fox(monkeypatch, command, "x", *words, "--columns", "time,open,high,low,close") == 2
    assert given["columns"] == ["time", "open", "high", "low", "close"]


@pytest.mark.parametrize("command", ["info", "build"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.csv"], "nowhere.csv does not exist"),
        (["ES.csv", "--columns", "time=when"], "tz"),
        (["ES.csv", *LOAD, "--bars", "7x"], "7x"),
        (["ES.csv", "--columns", "close", "--columns", "time=0"], "columns is 'close', expected meaning=column"),
        (["ES.csv", *LOAD, "--symbol", "ZZ"], "contract 'ZZ' is unknown"),
    ],
)
def test_bad_input_is_one_sentence(
    bars: Path, refused, tmp_path: Path, command: str, options: list[str], words: str
) -> None:
    assert words in refused(command, bars.parent / options[0], *options[1:], "--cache", tmp_path)


def test_a_chart_without_a_place_is_one_sentence(bars: Path, refused) -> None:
    assert "ES.csv" in refused("info", bars, *LOAD, "--chart", bars / "chart.png")


# --- synth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "schema", "count", "what"),
    [
        ([], "ohlcv-1m", "300", "bars"),
        (["--interval", "1h"], "ohlcv-1h", "300", "bars"),
        (["--schema", "ohlcv-1s"], "ohlcv-1s", "300", "bars"),
        (["--schema", "ohlcv-1d", "--interval", "1d"], "ohlcv-1d", "300", "bars"),
        (["--schema", "trades", "--interval", "5m"], "trades", None, "trades records"),
        (["--schema", "mbp-10"], "mbp-10", None, "mbp-10 records"),
    ],
)
def test_synth_writes_the_schema(
    options: list[str], schema: str, count: str | None, what: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    from databento import DBNStore

    assert fox(monkeypatch, "synth", tmp_path, "--kind", "garch", "--seed", 3, "--bars", 300, *options) == 0
    file = tmp_path / "ES.FUT" / f"garch-3.{schema}.dbn.zst"
    number, _, rest = capsys.readouterr().out.strip().partition(" ")
    assert rest == f"{what} in {file}"
    assert count in (None, number)
    store = DBNStore.from_file(file)
    assert store.schema == schema
    assert len(store.to_ndarray()) == int(number.replace(",", ""))
    assert names(tmp_path) == [file.name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schema", "ohlcv-1s", "--interval", "1m"], "--interval is 1m and --schema is ohlcv-1s"),
        (["--schema", "definition"], "definition"),
        (["--schema", "ohlcv-5m"], "ohlcv-5m"),
        (["--interval", "5m"], "5m"),
        (["--seed", "-1"], "seed is -1"),
    ],
)
def test_bad_options_of_synth(refused, tmp_path: Path, options: list[str], words: str) -> None:
    assert words in refused("synth", tmp_path, "--bars", 100, *options)
    assert names(tmp_path) == []


def test_what_synth_and_fetch_write_is_found_by_symbol(
    databento: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert fox(monkeypatch, "fetch", tmp_path, *YEAR, "--yes") == 0
    write_ohlcv(tmp_path / "other.dbn.zst", {"NQ": synthetic_bars("garch", 300, interval="1h").bars}, schema="ohlcv-1h")
    assert fox(monkeypatch, "info", tmp_path, "--symbol", "ES.FUT") == 0
    assert "ESH24" in capsys.readouterr().out


def test_the_commands_are_there() -> None:
    assert sorted(command.callback.__name__ for command in data_cli.data_app.registered_commands) == [
        "build", "fetch", "info", "synth",
    ]  # fmt: skip
