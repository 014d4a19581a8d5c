"""The command line: bad input ends in one sentence and exit code 2, good input in a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fox_env
from fox_agent import Agent, Trainer, cli
from fox_agent.cli import REPORT_FILE
from fox_agent.profile import load_profile
from fox_agent.trainer import METRICS_FILE, NO_EDGE, PROFILE_FILE
from fox_env.data.dbn_write import write_ohlcv
from fox_env.data.synthetic import synthetic_bars
from tests.agent.tiny import SMOKETEST, TINY

ROOT = Path(__file__).resolve().parents[2]


def tiny(**overrides: object) -> list[str]:
    values = TINY | {key.replace("__", "."): value for key, value in overrides.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def fox(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of ``fox arguments``."""
    monkeypatch.setattr(sys, "argv", ["fox", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    """Run ``fox arguments``, which is to be refused, and return the sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        assert fox(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert "Traceback" not in error
        return error.removeprefix("error: ").strip()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6,000 five-minute bars of a planted market in two formats, several roots, and files that are none."""
    place = tmp_path_factory.mktemp("data")
    made = synthetic_bars("planted", 6_000, 0).bars
    csv = ["time,open,high,low,close,volume"]
    columns = (made.open, made.high, made.low, made.close, made.volume)
    stamps = np.datetime_as_string(made.start.astype("datetime64[ns]"), unit="s")
    rows = [
        f"{stamp}Z,{','.join(map(str, row))}" for stamp, row in zip(stamps, zip(*columns, strict=True), strict=True)
    ]
    (place / "ES.csv").write_text("\n".join(csv + rows))
    (place / "few.csv").write_text("\n".join(csv + rows[:50]))
    (place / "empty.csv").touch()
    (place / "empty.dbn").touch()
    (place / "header.csv").write_text(csv[0] + "\n")
    (place / "notes.pdf").write_text("no bars")
    (place / "naive.csv").write_text("\n".join(csv + [row.replace("Z", "") for row in rows]))
    day = synthetic_bars("garch", 300, 0, interval="1m", start="2024-01-08").bars
    write_ohlcv(place / "several.dbn.zst", {"ESH24": day, "NQH24": day}, symbol="")
    return place


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        ("nowhere.csv", [], ["nowhere.csv does not exist"]),
        ("no*.nothing", [], ["no*.nothing does not exist"]),
        ("empty.csv", [], ["empty.csv"]),
        ("empty.dbn", [], ["empty.dbn is empty"]),
        ("header.csv", [], ["header.csv"]),
        ("notes.pdf", [], ["notes.pdf is of an unknown kind", "expected .dbn"]),
        ("several.dbn.zst", ["--symbol", "MES"], ["several.dbn.zst", "'MES'", "ESH", "NQH"]),
        ("several.dbn.zst", ["--symbol", "ZZ"], ["contract 'ZZ' is unknown", "ES, MES, NQ, MNQ"]),
        ("ES.csv", ["--symbol", "ZZ"], ["contract 'ZZ' is unknown"]),
        ("few.csv", [], ["50 bars are too few", "so at least", "of one contract are needed"]),
        ("naive.csv", [], ["naive.csv", "tz"]),
        ("naive.csv", ["--tz", "Mars/Base"], ["Mars/Base"]),
        ("ES.csv", ["--bars", "7x"], ["7x"]),
        ("ES.csv", ["--stamp", "middle"], ["data.stamp is 'middle'", "'start' or 'end'"]),
        ("ES.csv", ["--train-end", "2030-01-01", "--valid-end", "2031-01-01"], ["2030-01-01", "part empty"]),
        ("ES.csv", ["--train-end", "2030-01-01"], ["both train_end and valid_end"]),
        (
            "ES.csv",
            ["--set", "game.episode_bars=5000"],
            ["bars to decide at", "expected more than episode_bars = 5000"],
        ),
    ],
)
def test_bad_data_is_one_sentence(refused, folder: Path, file: str, options: list[str], words: list[str]) -> None:
    sentence = refused("train", *tiny(), "--data", folder / file, *options)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", "nowhere.toml"], ["profile nowhere.toml does not exist"]),
        (["--set", "train.sed=1"], ["train.sed is not a key of profile"]),
        (["--set", "train.seed"], ["--set 'train.seed' is not section.key=value"]),
        (["--set", "train.seed=x"], ["train.seed is 'x'", "valid integer"]),
        (["--set", "game.margin=3"], ["game.margin is 3"]),
        (["--set", "train.batch_size=300000"], ["train.batch_size is 300000", "replay.capacity, 2000"]),
        (["--set", "data.synthetic_bars=100"], ["100 bars are too few", "so at least"]),
        (["--set", "data.synthetic=planned"], ["data.synthetic is 'planned'"]),
        (["--set", 'data.drop_features=["nothing"]'], ["nothing"]),
        (["--set", "game.max_contracts=0"], ["game.max_contracts is 0"]),
        (["--seed", "-1"], ["train.seed is -1"]),
        (["--resume"], ["--resume needs --out"]),
        (["--resume", "--out", "nowhere"], ["nowhere/last.pt does not exist"]),
        (["--out", "a file"], ["a file"]),
        (["--device", "gpu"], ["gpu", "cpu"]),
        (["--device", "cuda:99"], ["cuda:99"]),
    ],
)
def test_bad_options_are_one_sentence(refused, tmp_path: Path, options: list[str], words: list[str]) -> None:
    (tmp_path / "a file").touch()
    sentence = refused("train", *tiny(), *options)
    for word in words:
        assert word in sentence
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_key_and_a_wrong_type_in_a_profile_are_named(refused, tmp_path: Path) -> None:
    text = SMOKETEST.read_text()
    for old, new, words in (
        ("learning_rate", "learning_rat", "train.learning_rat"),
        ("batch_size = 256", 'batch_size = "256"', "train.batch_size is '256'"),
    ):
        assert old in text
        (tmp_path / "p.toml").write_text(text.replace(old, new))
        sentence = refused("train", "--profile", "p.toml")
        assert words in sentence
        assert sentence.startswith("p.toml: ")


def test_what_click_refuses_has_exit_code_2_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fox(monkeypatch, "train", "--nothing") == 2
    assert fox(monkeypatch, "tarin") == 2


def test_an_unexpected_error_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: cli.Run) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run_command(cli.training_command(broken))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "planned"], ["planned"]),
        (["--bars", "0"], ["0"]),
        (["--interval", "7m"], ["7m"]),
    ],
)
def test_bad_options_of_synth(refused, tmp_path: Path, options: list[str], words: list[str]) -> None:
    sentence = refused("data", "synth", tmp_path / "out", "--bars", 100, *options)
    for word in words:
        assert word in sentence
    assert not list(tmp_path.rglob("*.dbn*"))


def test_a_file_in_the_way_of_synth(refused, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert "out" in refused("data", "synth", tmp_path / "out", "--bars", 100)


def test_bad_agents_and_markets_of_evaluate(refused, folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused("evaluate", "--agent", "nowhere", "--data", folder / "ES.csv")
    (tmp_path / "agent.safetensors").write_text("x")
    assert "is not an agent" in refused("evaluate", "--agent", tmp_path, "--data", folder / "ES.csv")


# --- What the options mean --------------------------------------------------------------------------------------------


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> cli.Run:
    runs: list[cli.Run] = []
    monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.run_command(cli.training_command(runs.append))
    assert not caught.value.code
    return runs[0]


def test_options_override_the_profile_and_set_overrides_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = parsed(
        monkeypatch, "--data", "bars.csv", "--mbp10", "book", "--trades", "/t/*.dbn", "--cache", "c",
        "--symbol", "NQ", "--bars", "5m", "--tz", "UTC", "--stamp", "end", "--definitions", "d",
        "--columns", "close=Last", "--columns", "time=0", "--roll", "calendar", "--hours", "rth", "--max-bars", 0,
        "--train-end", "2020-01-01", "--valid-end", "2021-01-01", "--seed", 7, "--out", "there",
        "--set", "train.seed=8", "--set", "train.epochs=3", "--resume",
    )  # fmt: skip
    data = run.profile.data
    assert data.path == str(tmp_path / "bars.csv")  # as seen from here, not from the profile's project
    assert (data.mbp10_data_dir, data.trades_data_dir) == (str(tmp_path / "book"), "/t/*.dbn")
    assert (data.definitions_data_dir, data.cache_dir) == (str(tmp_path / "d"), str(tmp_path / "c"))
    assert (data.columns, data.roll, data.hours, data.max_bars) == (["close=Last", "time=0"], "calendar", "rth", 0)
    assert data.synthetic == ""
    assert (data.symbol, data.bars, data.tz, data.stamp) == ("NQ", "5m", "UTC", "end")
    assert (data.train_end, data.valid_end) == ("2020-01-01", "2021-01-01")
    assert (run.profile.train.seed, run.profile.train.epochs) == (8, 3)
    assert (run.out, run.device, run.resume) == (Path("there"), "cpu", True)


def test_without_options_the_smoke_test_runs_in_a_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = parsed(monkeypatch)
    assert run.profile == load_profile(SMOKETEST)
    assert run.out.parent == Path("runs")
    assert run.out.name.startswith("dqn-smoketest-")
    assert not run.resume


def test_load_data_hands_on_what_the_profile_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    market = fox_env.synthetic_market("planted", 1_000)
    monkeypatch.setattr(fox_env, "load_market", lambda *args, **kwargs: calls.append((args, kwargs)) or market)
    given = {
        "path": "/x", "synthetic": "", "mbp10_data_dir": "/m", "trades_data_dir": "/t", "definitions_data_dir": "/d",
        "cache_dir": "/c", "symbol": "NQ", "columns": ["time", "close"], "bars": "vol:500", "tz": "UTC",
        "stamp": "end", "roll": "expiry", "hours": "rth", "max_bars": 7, "drop_features": ["rsi_14"],
    }  # fmt: skip
    assert cli.load_data(load_profile(SMOKETEST, {f"data.{key}": value for key, value in given.items()})) is market
    cli.load_data(load_profile(SMOKETEST, {"data.path": "/x", "data.synthetic": ""}))
    assert calls[0] == (("/x",), {
        "mbp10": "/m", "trades": "/t", "definitions": "/d", "cache": "/c", "symbol": "NQ",
        "columns": ["time", "close"], "bars": "vol:500", "tz": "UTC", "stamp": "end", "roll": "expiry",
        "hours": "rth", "max_bars": 7, "drop": ["rsi_14"],
    })  # fmt: skip
    cli.load_data(load_profile(SMOKETEST, {"data.path": "/x", "data.synthetic": "", "data.columns": ["close=Last"]}))
    assert calls[2][1]["columns"] == {"close": "Last"}
    nothing = dict.fromkeys(("mbp10", "trades", "definitions", "cache", "columns", "bars", "tz", "stamp"))
    assert calls[1] == (("/x",), {
        **nothing, "symbol": "ES", "roll": "volume", "hours": "all", "max_bars": 0, "drop": [],
    })  # fmt: skip


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_synth_writes_what_load_market_reads_and_train_learns_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fox(monkeypatch, "data", "synth", "made", "--bars", 9_000, "--seed", 3) == 0
    (file,) = (tmp_path / "made").rglob("*.dbn.zst")
    assert capsys.readouterr().out.strip() == f"9,000 bars in {file.relative_to(tmp_path)}"
    expected = synthetic_bars("planted", 9_000, 3, interval="1m").bars
    market = fox_env.load_market(tmp_path / "made")
    assert market.provenance["files"] == [file.name]
    at = np.searchsorted(expected.ts, market.ts)
    np.testing.assert_array_equal(expected.ts[at], market.ts)
    for name in ("open", "high", "low", "close", "volume"):
        np.testing.assert_allclose(
            getattr(market.bars, name), getattr(expected, name)[at], rtol=1e-9, atol=0.5 * (name == "volume")
        )
    assert len(market) == 9_000
    assert [name.partition(":")[0] for name in market.instruments] == ["ES.c.0"]

    assert fox(monkeypatch, "data", "info", "made") == 0
    told = capsys.readouterr().out
    assert "9,000 bars of 60 s" in told
    assert "ES.c.0" in told

    assert fox(monkeypatch, "train", *tiny(), "--data", "made", "--out", "run") == 0
    told = capsys.readouterr().out
    for words in ("9,000 bars of 60 s", "bytes a transition", "epoch   0", "epoch   1", NO_EDGE, "saved in run"):
        assert words in told
    run = tmp_path / "run"
    assert len((run / METRICS_FILE).read_text().splitlines()) == 2
    assert load_profile(run / PROFILE_FILE).data.path == str(tmp_path / "made")
    report = json.loads((run / REPORT_FILE).read_text())
    assert list(report["policies"]) == ["agent", "candidate", "flat", "long", "short", "random"]
    assert report["policies"]["agent"]["trades"] == 0 < report["policies"]["candidate"]["trades"]
    candidate = report["policies"]["candidate"]["net_pnl_usd"]
    assert f"the agent that the gate rejected; it would have made {candidate:,.0f} USD here" in told

    assert fox(monkeypatch, "train", *tiny(), "--data", "made", "--out", "run") == 2
    assert "holds a run already" in capsys.readouterr().err

    assert fox(monkeypatch, "evaluate", "--agent", "run/best", "--data", "made", "--out", "report.json") == 2
    assert "overlaps the bars that its normalizer was fitted on" in capsys.readouterr().err
    assert fox(monkeypatch, "data", "synth", "later", "--bars", 3_000, "--seed", 4) == 0
    (other,) = (tmp_path / "later").rglob("*.dbn.zst")
    other.unlink()
    write_ohlcv(
        other, {"ES": synthetic_bars("planted", 3_000, 4, interval="1m", start="2024-06-03").bars}, symbol="ES.c.0"
    )
    assert fox(monkeypatch, "evaluate", "--agent", "run/best", "--data", "later", "--out", "report.json") == 0
    assert json.loads((tmp_path / "report.json").read_text())["policies"]["agent"]["trades"] == 0  # no edge: flat


def test_csv_of_an_absolute_glob_trains(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        fox(monkeypatch, "train", *tiny(train__epochs=1), "--data", f"{folder}/ES*.csv", "--out", tmp_path / "run") == 0
    )
    assert (tmp_path / "run" / REPORT_FILE).exists()


def test_ctrl_c_keeps_a_checkpoint_and_resume_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fox(monkeypatch, "train", *tiny(), "--out", "whole") == 0
    update = Trainer._update

    def interrupt(trainer: Trainer) -> None:
        update(trainer)
        if trainer.update_count == 4:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "_update", interrupt)
    capsys.readouterr()
    assert fox(monkeypatch, "train", *tiny(), "--out", "stopped") == 130
    assert "stopped; go on with --resume --out stopped" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "stopped" / REPORT_FILE).exists()
    monkeypatch.setattr(Trainer, "_update", update)
    # The run's own profile is there to go on with.
    assert fox(monkeypatch, "train", "--out", "stopped", "--resume") == 0
    for name in (METRICS_FILE, REPORT_FILE, "best/agent.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_example_is_the_same_as_fox_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(ROOT / "examples" / "train_dqn.py"), *tiny(), "--out", "example"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert NO_EDGE in done.stdout
    assert fox(monkeypatch, "train", *tiny(), "--out", "command") == 0
    one, other = (json.loads((tmp_path / name / REPORT_FILE).read_text()) for name in ("example", "command"))
    assert one["policies"] == other["policies"]
    lines = [(tmp_path / name / METRICS_FILE).read_text() for name in ("example", "command")]
    assert lines[0] == lines[1]
    assert not Agent.load(tmp_path / "example" / "best").deployed
    assert "candidate" in one["policies"]


def test_a_deployed_agent_has_no_candidate_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "_passes_gate", lambda trainer: True)
    assert fox(monkeypatch, "train", *tiny(train__epochs=1), "--out", "run") == 0
    report = json.loads((tmp_path / "run" / REPORT_FILE).read_text())
    assert report["policies"]["agent"]["trades"] > 0
    assert "candidate" not in report["policies"]
