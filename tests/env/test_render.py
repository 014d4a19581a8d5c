"""Pictures and text of an episode: what they show, and that showing it changes nothing."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import gymnasium as gym
import matplotlib
import numpy as np
import pytest
from gymnasium import wrappers

from fox_env import FoxES, render
from fox_env.data.rolls import Segment
from tests.env.games import AFTERNOON, MINUTES, MORNING, make_bars, make_market, random_market

SHAPE = (640, 960, 3)
HOLD, FLAT, SHORT = np.array([2, 2, 0, 1]), np.array([1, 2, 0, 1]), np.array([0, 2, 0, 1])
UGLY = {"episode_bars": 0, "min_hold_bars": 2, "margin": False}
# Open, high, low and close of six bars; ES, half the spread 0.125.
ROWS = [
    (4000.0, 4001.0, 3999.0, 4000.0),
    (4001.0, 4003.0, 4001.0, 4003.0),
    (4003.0, 4004.0, 4003.0, 4004.0),
    (4004.0, 4006.5, 4004.0, 4006.5),
    (4006.0, 4006.0, 4002.0, 4002.0),
    (4002.0, 4002.0, 4000.0, 4000.0),
]


@pytest.fixture(scope="module")
def market():
    return random_market(np.random.default_rng(5))


@pytest.fixture(scope="module")
def actions():
    return np.repeat(np.random.default_rng(6).integers(0, 3, (80, 4)), 5, axis=0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(render.Clock, "wait", lambda self: None)


def play(env, actions, **options):
    env.reset(seed=0, options=options)
    for action in actions:
        result = env.step(action)
        if result[2] or result[3]:
            break
    return result


def view(env, bars=render.BARS):
    return env.unwrapped._renderer.view(bars)


# --- What is shown ----------------------------------------------------------------------------------------------------


def test_a_text_chart_worked_by_hand():
    """Six bars from 3999 to 4006.5 on 28 levels, so 3.6 levels a point, two levels a character.

    Their levels from low to high: 0–7, 7–14, 14–18, 18–27, 11–25, 4–11. Four are bought in bar 1 at 4001.125, level 8
    in row 4 from below; eight sold in bar 3 at 4003.875, level 18 in row 9. Steps earn 8 − 0.68, 4, −10 − 1.36, 18 and
    8 points of $50.
    """
    env = FoxES(make_market(make_bars(ROWS)), render_mode="ansi", episode_bars=0, min_hold_bars=1)
    play(env, [HOLD, HOLD, SHORT, SHORT, SHORT], start=0)
    np.testing.assert_allclose(view(env).equity_usd, [200_000, 200_366, 200_566, 199_998, 200_898, 201_298])
    assert env.render().splitlines() == [
        "ES X   2024-03-05 15:30:00 UTC   step 5",
        "position -4   equity $201,298.00   step costs $0.00 (0.000 points)   in all $102.00",
        " 4,006.50 │   █",
        "          │   ██",
        "          │   ██",
        "          │   ██",
        "          │  ▄S█",
        "          │  █ █",
        "          │ ▄█ █",
        "          │ █  █",
        "          │ █  ▀█",
        "          │ B   █",
        "          │█▀   █",
        "          │█    █",
        "          │█",
        " 3,999.00 │█",
        "          └^─────",
        "     long   ██",
        "    short     ███",
        "   equity  ▁▃▄▁▆█",
        "    costs  ▁▃▃███",
        "           03-05 15:30",
        "           B bought   S sold   X closed by rule   ^ start   ┴ session   R roll",
    ]


def test_views_hold_what_the_infos_say(market, actions):
    """Position, equity, costs and fills of every bar, in the original's terms also in the mirror."""
    for mirrored in (0.0, 1.0):
        env = FoxES(market, render_mode="ansi", mirror_prob=mirrored, **UGLY)
        _, info = env.reset(seed=0, options={"start": 20})
        bars, infos = [20], [info]
        for action in actions[:90]:
            *_, info = env.step(action)
            bars.append(env._bar)
            infos.append(info)
        shown = view(env)
        assert shown.first == max(0, env._bar + 1 - render.BARS) == 0
        rows = np.array(bars)
        for name in ("position", "equity_usd"):
            np.testing.assert_array_equal(getattr(shown, name)[rows], [info[name] for info in infos])
            assert np.isnan(getattr(shown, name)[:20]).all()
        np.testing.assert_allclose(shown.cost_usd[rows], np.cumsum([50 * info["cost_points"] for info in infos]))
        np.testing.assert_array_equal(shown.close, market.bars.close[: env._bar + 1])
        filled = [(b, i["fill_price"], "B" if i["filled"] > 0 else "S")
                  for b, i in zip(bars, infos, strict=True) if i["filled"]]  # fmt: skip
        assert len(filled) > 5
        assert [mark for mark in shown.marks if mark[2] != "X"] == filled
        assert ("mirrored, shown as the original" in env.render()) == bool(mirrored)


def test_only_the_last_bars_are_shown_and_none_after_the_observed_one(market, actions):
    env = FoxES(market, render_mode="ansi", **UGLY)
    play(env, actions[:300], start=5)
    shown = view(env)
    assert (shown.first, len(shown.close), shown.start) == (env._bar + 1 - render.BARS, render.BARS, 5 - shown.first)
    assert shown.start < 0
    np.testing.assert_array_equal(shown.close, market.bars.close[env._bar + 1 - render.BARS : env._bar + 1])
    assert np.isfinite(shown.position).all()
    assert min(index for index, *_ in shown.marks) >= 0
    assert len(view(env, 30).close) == 30


def test_closes_by_rule_are_marked_at_the_close():
    """Held until 16:00, where `flat_at_close` sells at the close of that bar."""
    rows = [(4000.0,) * 4, (4001.0,) * 4, (4002.0,) * 4]
    env = FoxES(make_market(make_bars(rows, start=AFTERNOON - 5 * MINUTES)), render_mode="ansi", episode_bars=0,
                flat_at_close=True)  # fmt: skip
    play(env, [HOLD, HOLD], start=0)
    assert view(env).marks == [(1, 4001.125, "B"), (2, 4002.0, "X")]
    np.testing.assert_array_equal(view(env).position, [0, 4, 0])
    # A margin call is one, too.
    rows = [(4000.0,) * 4, (4000.0,) * 4, (3900.0,) * 4]
    env = FoxES(make_market(make_bars(rows)), render_mode="ansi", episode_bars=0, initial_equity_usd=5_000.0)
    assert play(env, [HOLD, HOLD], start=0)[2]
    assert view(env).marks == [(1, 4000.125, "B"), (2, 3900.0, "X")]
    assert "X" in env.render()


def test_rolls_and_sessions_are_marked():
    """An unmeasured roll closes the position at the old contract's last close, where the mark is."""
    old = make_bars([(4000.0,) * 4] * 3)
    new = make_bars([(4100.0,) * 4] * 3, start=MORNING + 15 * MINUTES)
    market = make_market([Segment("ESH4", old, 0, 0.0), Segment("ESM4", new, 0, np.nan)])
    env = FoxES(market, render_mode="ansi", episode_bars=0, min_hold_bars=1)
    play(env, [HOLD, HOLD, HOLD, HOLD], start=0)
    shown = view(env)
    assert shown.rolls == [(3, "ESM4")]
    assert shown.marks == [(1, 4000.125, "B"), (2, 4000.0, "X"), (4, 4100.125, "B")]
    assert shown.titles[0].startswith("ESM4   2024-03-05 15:25:00 UTC")
    assert env.render().splitlines()[16] == "          └^──R─"
    first, second = (
        make_bars(ROWS[:3], start=AFTERNOON - 5 * MINUTES),
        make_bars(ROWS[3:], start=AFTERNOON + 70 * MINUTES),
    )
    joined = {n: np.concatenate([getattr(first, n), getattr(second, n)])
              for n in ("start", "ts", "open", "high", "low", "close", "volume")}  # fmt: skip
    env = FoxES(make_market(type(first)(**joined)), render_mode="ansi", episode_bars=0)
    play(env, [FLAT] * 4, start=0)
    assert view(env).sessions == [3]
    assert env.render().splitlines()[16] == "          └^──┴─"


@pytest.mark.parametrize("settings", [{}, {"mirror_prob": 1.0}, {"margin": True, "initial_equity_usd": 2_600.0}])
def test_text_fits_a_hundred_columns(settings, market, actions):
    env = FoxES(market, render_mode="ansi", **{**UGLY, **settings})
    env.reset(seed=0)
    lengths = set()
    for action in actions:
        lines = env.render().splitlines()
        assert max(map(len, lines)) <= 100
        assert all(line.isprintable() and line == line.rstrip() for line in lines)
        lengths.add(len(lines))
        if any(env.step(action)[2:4]):
            break
    assert lengths == {23}
    env.render()


@pytest.mark.parametrize("price", [4000.0, 0.25, 1e7])
def test_a_market_that_stands_still(price):
    env = FoxES(make_market(make_bars([(price,) * 4] * 4)), render_mode="ansi", episode_bars=0)
    play(env, [FLAT] * 3, start=0)
    assert env.render().splitlines()[15].endswith("│▄▄▄▄")
    env = FoxES(make_market(make_bars([(price,) * 4] * 4)), render_mode="rgb_array", episode_bars=0)
    play(env, [HOLD] * 3, start=0)
    assert env.render().shape == SHAPE


# --- Pictures ---------------------------------------------------------------------------------------------------------


def frames(market, actions, every, **settings):
    """Frames of an episode, rendered every so many steps and at its end."""
    env = FoxES(market, render_mode="rgb_array", **{**UGLY, **settings})
    env.reset(seed=0, options={"start": 20})
    made = [env.render()] if every else []
    for step, action in enumerate(actions):
        if any(env.step(action)[2:4]):
            break
        if every and step % every == 0:
            made.append(env.render())
    return [*made, env.render()]


def test_pictures(market, actions):
    """A figure that is drawn on again and again shows what a new one does; frames are the caller's own."""
    many, once = frames(market, actions[:250], 25), frames(market, actions[:250], 0)
    for frame in many:
        assert (type(frame), frame.dtype, frame.shape) == (np.ndarray, np.uint8, SHAPE)
    assert len({frame.tobytes() for frame in many}) == len(many)
    np.testing.assert_array_equal(many[-1], once[0])


def test_nothing_of_an_episode_is_left_in_the_next(market, actions):
    env, fresh = (FoxES(market, render_mode="rgb_array", **UGLY) for _ in range(2))
    play(env, actions[:40], start=20)
    env.render()
    for one in (env, fresh):
        one.reset(seed=0, options={"start": 300})
    np.testing.assert_array_equal(env.render(), fresh.render())


def test_colours_of_a_picture():
    """Red where something was sold and short, green where bought and long, and only there."""
    market = make_market(make_bars(ROWS))
    green, red, purple = [0, 135, 90], [209, 36, 47], [125, 63, 201]
    long, short = [64, 165, 131], [220, 91, 99]

    def count(colour, script):
        env = FoxES(market, render_mode="rgb_array", episode_bars=0, min_hold_bars=1)
        play(env, script, start=0)
        return int((env.render() == colour).all(-1).sum())

    nothing, bought, sold = [FLAT] * 5, [HOLD] * 5, [SHORT] * 5
    # The legend has one of each.
    assert count(green, bought) > 1.5 * count(green, nothing) > 0
    assert count(red, sold) > 1.5 * count(red, nothing) > 0
    assert count(green, sold) == count(green, nothing)
    assert count(red, bought) == count(red, nothing)
    assert count(purple, bought) == count(purple, nothing) > 0
    assert [count(long, script) > 100 for script in (nothing, bought, sold)] == [False, True, False]
    assert [count(short, script) > 100 for script in (nothing, bought, sold)] == [False, False, True]


def test_the_users_settings_of_matplotlib_are_not_used_and_not_changed(market, actions):
    expected = frames(market, actions[:150], 0)[0]  # with a roll
    mine = {"axes.facecolor": "black", "font.family": "monospace", "text.color": "pink", "xtick.color": "pink"}
    with matplotlib.rc_context(mine):
        before = dict(matplotlib.rcParams)
        np.testing.assert_array_equal(frames(market, actions[:150], 0)[0], expected)
        assert dict(matplotlib.rcParams) == before


def test_neither_display_nor_pyplot_is_needed():
    code = """
import sys
import numpy as np
import fox_env
market = fox_env.synthetic_market("planted", 3_000)
env = fox_env.FoxES(market)
env.reset(seed=0)
env.step(np.array([2, 2, 0, 1]))
assert "matplotlib" not in sys.modules
env = fox_env.FoxES(market, render_mode="rgb_array")
env.reset(seed=0)
assert env.render().std() > 5
assert "matplotlib.pyplot" not in sys.modules
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


# --- The game ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", render.RENDER_MODES)
def test_rendering_does_not_change_the_game(mode, market, actions, capsys):
    plain, shown = (FoxES(market, render_mode=m, mirror_prob=0.5, episode_bars=30) for m in (None, mode))
    for seed in (1, 2):
        np.testing.assert_array_equal(plain.reset(seed=seed)[0], shown.reset(seed=seed)[0])
        for step, action in enumerate(actions[:30]):
            one, two = plain.step(action), shown.step(action)
            np.testing.assert_array_equal(one[0], two[0])
            assert one[1:4] == two[1:4]
            assert str(one[4]) == str(two[4])
            if step % 10 == 0:
                shown.render()
    shown.close()
    shown.close()
    assert bool(capsys.readouterr().out) == (mode == "human")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
@pytest.mark.parametrize("mode", ["rgb_array", "ansi"])
def test_a_copy_draws_its_own(mode, how, market, actions):
    env = FoxES(market, render_mode=mode, **UGLY)
    play(env, actions[:20], start=20)
    before = env.render()
    other = how(env)
    np.testing.assert_array_equal(other.render(), before)
    other.step(HOLD)
    np.testing.assert_array_equal(env.render(), before)


def test_rendering_without_a_mode_or_an_episode(market):
    env = FoxES(market, episode_bars=20)
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
    with pytest.raises(RuntimeError, match=r"before reset\(\)"):
        FoxES(market, render_mode="ansi", episode_bars=20).render()
    with pytest.raises(ValueError, match="render_mode is 'svg', expected one of human, rgb_array, ansi or None"):
        FoxES(market, render_mode="svg")


# --- Human ------------------------------------------------------------------------------------------------------------


class Screen(io.TextIOWrapper):
    """A terminal."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self):
        return True

    @property
    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def human(market, monkeypatch, out):
    monkeypatch.setattr(sys, "stdout", out)
    env = FoxES(market, render_mode="human", episode_bars=20)
    env.reset(seed=0)
    for _ in range(2):
        env.step(HOLD)
    assert env.render() is None
    env.close()


def test_no_control_characters_reach_a_file(market, monkeypatch):
    out = io.StringIO()
    human(market, monkeypatch, out)
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    charts = out.getvalue().split("\n\n")
    assert [chart.splitlines()[0].split("   ")[-1] for chart in charts[:-1]] == ["step 0", "step 1", "step 2", "step 2"]


def test_a_terminal_shows_one_chart_in_place(market, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setenv("LINES", "15")
    out = Screen()
    human(market, monkeypatch, out)
    first, *later = out.text.split("\x1b[H")[1:]
    assert out.text.startswith("\x1b[2J\x1b[H")
    assert "\x1b[2J" not in first + "".join(later)
    for chart in (first, *later):
        lines = chart.removesuffix("\x1b[J").split("\n")
        # Fourteen lines and the cursor's own fit a screen of fifteen; each wipes the rest of its line.
        assert len(lines) == 15
        assert all(line.endswith("\x1b[K") and len(line) <= 72 + 3 for line in lines[:-1])
        assert lines[-1] == ""


def test_a_dumb_terminal_is_a_file(market, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Screen()
    human(market, monkeypatch, out)
    assert "\x1b" not in out.text


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_stream_without_blocks_gets_question_marks(term, market, monkeypatch):
    monkeypatch.setenv("TERM", term)
    out = Screen("ascii")
    human(market, monkeypatch, out)
    assert "?" in out.text
    assert "position" in out.text


def test_a_window_where_there_is_one(market, actions, monkeypatch, capsys):
    """matplotlib's own backend stands in for one with windows."""
    from matplotlib import pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    monkeypatch.setattr(FigureCanvasAgg, "required_interactive_framework", "headless")
    monkeypatch.setattr(matplotlib.figure.Figure, "show", lambda self: None)
    monkeypatch.setattr(FigureCanvasBase, "flush_events", lambda self: drawn.append(self))
    drawn = []
    with matplotlib.rc_context({"backend": "agg"}):
        env = FoxES(market, render_mode="human", **UGLY)
        play(env, actions[:3], start=20)
        assert len(drawn) == 4
        np.testing.assert_array_equal(np.asarray(drawn[-1].buffer_rgba())[..., :3], frames(market, actions[:3], 0)[0])
        assert not capsys.readouterr().out
        # The user closes it: nothing more is drawn, and the game goes on.
        plt.close("all")
        env.step(HOLD)
        assert len(drawn) == 4
        env.close()
        env = FoxES(market, render_mode="human", **UGLY)
        env.reset(seed=0)
        # A second environment has a window of its own, and the user's figures stay as they are.
        mine = plt.figure("FoxES")
        other = FoxES(market, render_mode="human", **UGLY)
        other.reset(seed=0)
        assert [len(plt.figure(number).axes) for number in plt.get_fignums()] == [4, 0, 4]
        other.close()
        env.close()
        assert plt.get_fignums() == [mine.number]
        plt.close(mine)


# --- Gymnasium's wrappers ---------------------------------------------------------------------------------------------


def test_through_gymnasium(market):
    env = gym.make("FoxES-v0", market=market, render_mode="rgb_array", episode_bars=20)
    assert env.metadata["render_fps"] == render.FPS
    with pytest.raises(gym.error.ResetNeeded):
        env.render()
    env.reset(seed=0)
    assert env.render().shape == SHAPE
    env.close()
    env = gym.make("FoxES-Discrete-v0", market=market, render_mode="rgb_array_list", episode_bars=20)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    assert [frame.shape for frame in env.render()] == [SHAPE] * 4
    env.close()


@pytest.mark.filterwarnings("ignore")
def test_record_video(market, tmp_path):
    pytest.importorskip("moviepy")
    env = gym.make("FoxES-v0", market=market, render_mode="rgb_array", episode_bars=3)
    env = wrappers.RecordVideo(env, str(tmp_path), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    for _ in range(3):
        env.step(HOLD)
    env.close()
    (video,) = tmp_path.glob("*.mp4")
    assert video.stat().st_size > 1_000


@pytest.mark.filterwarnings("ignore")
def test_human_rendering(market, monkeypatch):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = wrappers.HumanRendering(gym.make("FoxES-v0", market=market, render_mode="rgb_array", episode_bars=3))
    env.reset(seed=0)
    env.step(HOLD)
    assert env.window.get_size() == (SHAPE[1], SHAPE[0])
    env.close()
