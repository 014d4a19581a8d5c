"""Damaged files give a market that can be played, or one sentence.

FOX_FUZZ=2000 tries that many files instead of the usual number.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fox_env.data.bars import Bars
from fox_env.data.dbn_write import from_books, write_dbn, write_live, write_ohlcv
from fox_env.data.load import load_market
from fox_env.data.synthetic import books_from_bars, synthetic_bars, ticks_from_bars
from fox_env.vector_env import FoxESVectorEnv

EXAMPLES = int(os.environ.get("FOX_FUZZ", "120"))
WORDS = (0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 1_704_758_400_000_000_000, 250_000_000)


def table(bars: Bars, kind: str) -> bytes:
    """The bars as text in one of the forms that people have."""
    time = bars.start.astype("datetime64[ns]")
    rows = zip(time, bars.start, bars.open, bars.high, bars.low, bars.close, bars.volume, strict=True)
    if kind == "iso.csv":
        return ("time,open,high,low,close,volume\n" + "".join(
            f"{np.datetime_as_string(t, 's')}+00:00,{o},{h},{low},{c},{v:.0f}\n" for t, _, o, h, low, c, v in rows
        )).encode()  # fmt: skip
    if kind == "sierra.txt":
        stamps = [(np.datetime_as_string(t, "s").replace("-", "/").split("T"), *rest) for t, *rest in rows]
        return ("Date, Time, Open, High, Low, Last, Volume\n" + "".join(
            f"{d}, {clock}, {o}, {h}, {low}, {c}, {v:.0f}\n" for (d, clock), _, o, h, low, c, v in stamps
        )).encode()  # fmt: skip
    if kind == "epoch.csv":
        return (
            "ts,o,h,l,c\n" + "".join(f"{n // 10**9},{o},{h},{low},{c}\n" for _, n, o, h, low, c, _ in rows)
        ).encode()
    if kind == "ninja.txt":
        stamps = [(np.datetime_as_string(t, "s").translate({45: None, 58: None, 84: 32}), *rest) for t, *rest in rows]
        return "".join(f"{t};{o};{h};{low};{c};{v:.0f}\n" for t, _, o, h, low, c, v in stamps).encode()
    assert kind == "bars.json"
    names = ("time", "open", "high", "low", "close")
    objects = [dict(zip(names, (int(n) // 10**9, *map(float, prices)), strict=True)) for _, n, *prices, _ in rows]
    return json.dumps(objects).encode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Sound files of every kind: name and content."""
    folder = tmp_path_factory.mktemp("whole")
    bars = synthetic_bars("planted", 260, seed=1, interval="1m", start="2024-01-09").bars
    short = bars.take(slice(0, 150))
    books, trades = (np.concatenate(list(make(short, seed=1))) for make in (books_from_bars, ticks_from_bars))
    for version in (1, 2, 3):
        write_ohlcv(folder / f"v{version}.ohlcv-1m.dbn", {"ESH24": bars, "ESM24": bars}, version=version)
    write_ohlcv(folder / "continuous.ohlcv-1m.dbn.zst", {"ESH24": bars}, symbol="ES.c.0")
    write_dbn(folder / "trades.dbn.zst", "trades", {"ESH24": trades})
    write_dbn(folder / "mbp-1.dbn", "mbp-1", {"ESH24": np.concatenate(list(from_books("mbp-1", [books])))})
    write_dbn(folder / "mbp-10.dbn.zst", "mbp-10", {"ESH24": books})
    trades["instrument_id"] = 1
    write_live(folder / "live.dbn", {1: "ESH4"}, trades[:3000])
    for kind in ("iso.csv", "sierra.txt", "epoch.csv", "ninja.txt", "bars.json"):
        (folder / kind).write_bytes(table(bars, kind))
    return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]


@st.composite
def damages(draw):
    """A list of changes, positions as shares of the length."""
    share = st.floats(0, 1, exclude_max=True)
    one = st.one_of(
        st.tuples(st.just("flip"), share, st.integers(1, 255)),
        st.tuples(st.just("word"), share, st.sampled_from(WORDS)),
        st.tuples(st.just("cut"), share, st.just(0)),
        st.tuples(st.just("drop"), share, st.integers(1, 200)),
        st.tuples(st.just("repeat"), share, st.integers(1, 400)),
        st.tuples(st.just("insert"), share, st.binary(min_size=1, max_size=20)),
        st.tuples(
            st.just("text"), share, st.sampled_from([b",", b"\n", b";", b'"', b"nan", b"-", b"1e400", b"\xff\xfe"])
        ),
    )
    return draw(st.lists(one, min_size=1, max_size=6))


def damaged(data: bytes, changes) -> bytes:
    data = bytearray(data)
    for kind, share, value in changes:
        at = int(share * len(data))
        if kind == "flip" and data:
            data[at] ^= value
        elif kind == "word":
            at -= at % 8
            data[at : at + 8] = struct.pack("<q", value)
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + value]
        elif kind == "repeat":
            data[at:at] = data[at : at + value]
        elif kind in ("insert", "text"):
            data[at:at] = value
    return bytes(data)


def play(market) -> None:
    """A few steps of anything: all that an agent sees is finite and inside its space."""
    assert np.isfinite(market.features).all()
    # A market may hold few bars to decide at.
    envs = FoxESVectorEnv(num_envs=4, market=market, episode_bars=min(20, np.count_nonzero(market.decision) - 1))
    envs.action_space.seed(0)
    observation, _ = envs.reset(seed=0)
    for _ in range(25):
        assert envs.observation_space.contains(observation)
        observation, reward, *_ = envs.step(envs.action_space.sample())
        assert np.isfinite(reward).all()
    envs.close()


@settings(max_examples=EXAMPLES, deadline=20_000, suppress_health_check=list(HealthCheck))
@given(data=st.data(), changes=damages(), inside=st.booleans())
def test_damaged_files(whole, tmp_path_factory, data, changes, inside):
    name, content = data.draw(st.sampled_from(whole))
    if name.endswith(".zst") and inside:  # else the checksum finds everything
        unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        content = zstandard.ZstdCompressor().compress(damaged(unpacked, changes))
    else:
        content = damaged(content, changes)
    path = Path(tmp_path_factory.getbasetemp()) / name
    path.write_bytes(content)
    bars = data.draw(st.sampled_from([None, "1m", "5m", "vol:300"]))
    sentence, market = "", None
    try:
        market = load_market(path, bars=bars, tz="UTC", max_bars=400)
    except ValueError as error:
        sentence = str(error)
    if market is not None:
        play(market)
    else:
        assert "\n" not in sentence
        assert name in sentence


def test_sound_files_are_sound(whole, tmp_path):
    """What is damaged above is read before the damage."""
    for name, content in whole:
        path = tmp_path / name
        path.write_bytes(content)
        bars = "1m" if not name.startswith(("v", "continuous")) and ".dbn" in name else None
        market = load_market(path, bars=bars, tz="UTC")
        assert len(market) > 140
        play(market)
