"""``fox audit``: a line a check, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fox_agent import cli
from fox_env import leaks
from fox_env.data.features import ODD, Feature
from fox_env.data.synthetic import synthetic_bars

CHECKS = tuple(leaks._CHECKS)
PEEK = [Feature("peek", ODD, 1, lambda x: np.append(np.diff(x.bars.close), 0.0))]
GOOD = Feature("move", ODD, 1, lambda x: np.diff(x.bars.close, prepend=x.bars.close[0]))


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_MARTINGALE_STEPS", 1_000)


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Exit code, result of each check and error of ``fox audit arguments``."""

    def run(*arguments: object) -> tuple[int, dict[str, tuple[str, str]], str]:
        monkeypatch.setattr(sys, "argv", ["fox", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        lines = [(line[9:29].strip(), (line[:8].strip(), line[30:])) for line in captured.out.splitlines()]
        return caught.value.code or 0, dict(lines), captured.err

    return run


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "bars.csv", 1_500, "5m")


def write(path: Path, bars: int, interval: str) -> Path:
    made = synthetic_bars("garch", bars, interval=interval).bars
    columns = {name: getattr(made, name) for name in ("open", "high", "low", "close", "volume")}
    pd.DataFrame({"time": pd.to_datetime(made.start, utc=True), **columns}).to_csv(path, index=False)
    return path


def test_a_clean_market_passes_on_a_line_a_check(audit, table, tmp_path):
    code, found, error = audit(table, "--json", tmp_path / "report.json")
    assert (code, error) == (0, "")
    assert tuple(found) == CHECKS
    assert {result for result, _ in found.values()} == {"passed"}
    told = json.loads((tmp_path / "report.json").read_text())
    assert [check["finding"] for check in told["checks"]] == [finding for _, finding in found.values()]


def test_an_alarm_is_exit_code_1(audit, table):
    code, found, _ = audit(table, "--stamp", "end")
    assert code == 1
    assert [name for name, (result, _) in found.items() if result == "failed"] == ["time order"]
    assert "stamped early" in found["time order"][1]


def test_features_of_the_users(audit, table):
    code, found, _ = audit(table, "--features", f"{__name__}:PEEK")
    assert code == 1
    assert "feature 'peek' read the future" in found["future rebuild"][1]
    code, found, _ = audit(table, "--features", f"{__name__}:GOOD")
    assert (code, found["future rebuild"][0]) == (0, "passed")


def test_finer_bars(audit, table, tmp_path):
    minutes = write(tmp_path / "minutes.csv", 7_500, "1m")
    longer = tmp_path / "longer.csv"
    frame = pd.read_csv(minutes, parse_dates=["time"], index_col="time")
    rule = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    frame.resample("5min").agg(rule).dropna().to_csv(longer)
    code, found, _ = audit(longer, "--finer", minutes)
    assert (code, found["stamps"][1]) == (0, "100.0% of the bars have the prices of the 1 min rows of their time")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.csv"], "nowhere.csv does not exist"),
        (["{table}", "--features", "no_such_module:x"], "--features is 'no_such_module:x', expected module:attribute"),
        (["{table}", "--features", "json:nothing"], "--features is 'json:nothing', expected module:attribute"),
        (
            ["{table}", "--features", "json:dumps"],
            "--features json:dumps is of type function, expected a list of names",
        ),
        (
            ["{table}", "--features", "json:__name__"],
            "--features json:__name__ is of type str, expected a list of names",
        ),
        (["{table}", "--seed", "-1"], "seed is -1, expected an integer in"),
        (["{table}", "--symbol", "XX"], "contract 'XX' is unknown"),
        (["{table}", "--max-bars", "50"], "50 bars are too few"),
    ],
)
def test_bad_input_is_exit_code_2(audit, table, arguments, words):
    code, found, error = audit(*(argument.format(table=table) for argument in arguments))
    assert (code, found) == (2, {})
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
