"""Charts of an episode for `FoxES.render`: a picture, a window, or text for a terminal.

Everything is shown in the original market's terms, also in a mirrored episode, and nothing after the observed bar.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fox_env import dynamics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fox_env.market import Market

RENDER_MODES = ("human", "rgb_array", "ansi")
FPS = 20
BARS = 200
"""Bars in a picture."""
SIZE = (640, 960)
"""Height and width of a picture in pixels, even as video codecs want."""
COLUMNS = 100
"""Width of a text chart."""
_ROWS, _LABEL, _LEAST_COLUMNS = 14, 11, 40
_UP_TO = " ▁▂▃▄▅▆▇█"
_DOWN_TO = " ▔▀█"  # the only blocks that hang from the top


class Played(NamedTuple):
    """What one step left behind.

    bar, observed: the bar that it played, and the bar observed after it. position, equity_usd: after the step.
    cost_usd: since reset. filled, fill_price: the agent's order. forced, forced_bar, forced_price: contracts closed by
    the rules, and the close at which.
    """

    bar: int
    observed: int
    position: int
    equity_usd: float
    cost_usd: float
    filled: int
    fill_price: float
    forced: int
    forced_bar: int
    forced_price: float


@dataclass(frozen=True)
class View:
    """The last n bars of a chart.

    Attributes:
        titles: lines of text, what the account holds in the last one.
        times: label of each bar.
        first: the first bar.
        open, high, low, close: points, [n].
        position, equity_usd, cost_usd: at each close, NaN before the episode, [n]; `cost_usd` since reset.
        start: index of the bar at which the episode started, negative if that is further back.
        marks: index, price and letter of each fill: B bought, S sold, X closed by the rules.
        sessions: indices of the first bars of sessions.
        rolls: indices of the first bars of contracts, with their names.
        max_contracts: contracts of a Full position.
    """

    titles: tuple[str, str]
    times: list[str]
    first: int
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    position: np.ndarray
    equity_usd: np.ndarray
    cost_usd: np.ndarray
    start: int
    marks: list[tuple[int, float, str]]
    sessions: list[int]
    rolls: list[tuple[int, str]]
    max_contracts: int

    @property
    def price_range(self) -> tuple[float, float]:
        """Lowest and highest price to show."""
        prices = [price for _, price, _ in self.marks]
        return float(min([self.low.min(), *prices])), float(max([self.high.max(), *prices]))


class Renderer:
    """What is needed to draw one environment's episode, told step by step.

    Args:
        market: that is played.
        rules: of the game.
        mode: one of `RENDER_MODES`.
    """

    def __init__(self, market: Market, rules: dynamics.Rules, mode: str) -> None:
        self.market, self.rules, self.mode = market, rules, mode
        self._played: deque[Played] = deque(maxlen=BARS)
        self._picture: Picture | None = None
        self._window: Window | Terminal | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_picture": None, "_window": None}  # a copy draws its own

    def reset(self, bar: int, mirrored: int, info: Mapping[str, Any]) -> None:
        """Begin an episode at `bar`."""
        self._start, self._mirrored, self._steps, self._step_cost = bar, mirrored, 0, 0.0
        self._played.clear()
        self._played.append(Played(bar, bar, 0, info["equity_usd"], 0.0, 0, np.nan, 0, bar, np.nan))
        if self.mode == "human":
            self.show()

    def add(self, bar: int, info: Mapping[str, Any]) -> None:
        """Take in the step after which `bar` was observed."""
        last = self._played[-1]
        played = last.observed + 1
        # Where a contract ends and none takes over, its position is closed at its last close.
        forced_bar = played - (self.market.roll[played] == dynamics.UNMEASURED)
        self._steps += 1
        self._step_cost = info["cost_points"]
        self._played.append(
            Played(
                played, bar, info["position"], info["equity_usd"],
                last.cost_usd + info["cost_points"] * self.rules.multiplier, info["filled"], info["fill_price"],
                info["forced"], forced_bar, float(self.market.bars.close[forced_bar]),
            )
        )  # fmt: skip
        if self.mode == "human":
            self.show()

    def render(self) -> np.ndarray | str | None:
        """The chart: uint8 [H, W, 3], text, or None once it is shown.

        Raises:
            RuntimeError: before the first reset.
        """
        if not self._played:
            raise RuntimeError("render() was called before reset()")
        if self.mode == "ansi":
            return text_chart(self.view(COLUMNS - _LABEL), COLUMNS)
        if self.mode == "rgb_array":
            return self.frame()
        return self.show()

    def frame(self) -> np.ndarray:
        """The picture, uint8 [640, 960, 3]."""
        if self._picture is None:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            figure = Figure()
            FigureCanvasAgg(figure)
            self._picture = Picture(figure)
        self._picture.draw(self.view(BARS))
        return np.asarray(self._picture.figure.canvas.buffer_rgba())[..., :3].copy()

    def show(self) -> None:
        """Show the chart in a window where there is one, else in the terminal."""
        if self._window is None:
            self._window = Window.open() or Terminal()
        self._window.show(self.view)

    def close(self) -> None:
        """Close the window, if one is open."""
        if self._window is not None:
            self._window.close()
        self._picture = self._window = None

    def view(self, bars: int) -> View:
        """The last `bars` bars up to the observed one."""
        market, last = self.market, self._played[-1]
        stop = last.observed + 1
        first = max(0, stop - bars)
        rows = slice(first, stop)
        position, equity, cost = (np.full(stop - first, np.nan) for _ in range(3))
        marks = []
        for one in self._played:
            shown = slice(max(one.bar - first, 0), max(one.observed + 1 - first, 0))
            position[shown], equity[shown], cost[shown] = one.position, one.equity_usd, one.cost_usd
            if one.filled and one.bar >= first:
                marks.append((one.bar - first, one.fill_price, "B" if one.filled > 0 else "S"))
            if one.forced and one.forced_bar >= first:
                marks.append((one.forced_bar - first, one.forced_price, "X"))
        # The first bar shown begins nothing that could be seen.
        inner = slice(first + 1, stop)
        rolls = np.flatnonzero(market.roll[inner]) + 1
        style = "%m-%d %H:%M" if market.interval_ns >= 60_000_000_000 else "%m-%d %H:%M:%S"
        name = market.instruments[market.instrument[last.observed]]
        contract = name if name.startswith(market.contract.name) else f"{market.contract.name} {name}"
        points, dollars = self._step_cost, self._step_cost * self.rules.multiplier
        return View(
            titles=(
                f"{contract}   {_utc(market.ts[last.observed], '%Y-%m-%d %H:%M:%S')} UTC   step {self._steps:,}"
                + ("   mirrored, shown as the original" if self._mirrored else ""),
                f"position {f'{last.position:+d}' if last.position else 0}   equity {_usd(last.equity_usd)}   "
                f"step costs {_usd(dollars)} ({points:.3f} points)   in all {_usd(last.cost_usd)}",
            ),
            times=[_utc(ts, style) for ts in market.ts[rows]],
            first=first,
            open=np.asarray(market.bars.open[rows]),
            high=np.asarray(market.bars.high[rows]),
            low=np.asarray(market.bars.low[rows]),
            close=np.asarray(market.bars.close[rows]),
            position=position,
            equity_usd=equity,
            cost_usd=cost,
            start=self._start - first,
            marks=marks,
            sessions=(np.flatnonzero(np.diff(market.session[rows])) + 1).tolist(),
            rolls=[(int(i), market.instruments[market.instrument[first + i]]) for i in rolls],
            max_contracts=self.rules.max_contracts,
        )


class Picture:
    """A view as panels of price, position, equity and costs on one matplotlib figure, whose parts are made once."""

    def __init__(self, figure: Figure) -> None:
        from matplotlib import style
        from matplotlib.collections import LineCollection, PolyCollection

        self.figure = figure
        with style.context("default"):
            figure.set_size_inches(SIZE[1] / 100, SIZE[0] / 100)
            figure.set_dpi(100)
            figure.set_facecolor("white")
            self.panels = price, position, equity, cost = figure.subplots(
                4, 1, sharex=True, gridspec_kw={"height_ratios": [6, 1.3, 1.6, 1.3], "hspace": 0.09}
            )
            figure.subplots_adjust(left=0.095, right=0.985, top=0.9, bottom=0.055)
            self._titles = [
                figure.text(0.095, y, "", fontsize=size, color=color)
                for y, size, color in ((0.955, 12, "#111111"), (0.917, 10.5, "#444444"))
            ]
            for axes, label in zip(self.panels, ("price, points", "position", "equity, $", "costs, $"), strict=True):
                axes.set_ylabel(label, fontsize=9)
                axes.yaxis.set_label_coords(-0.075, 0.5)
                axes.tick_params(labelsize=8, length=2)
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
                axes.set_axisbelow(True)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
                # matplotlib's offsets and rounded limits would hide the figures themselves.
                axes.margins(0)
            equity.yaxis.get_major_locator().set_params(nbins=4)
            cost.yaxis.get_major_locator().set_params(nbins=3)
            self._spans = [axes.axvspan(0, 0, color="#f2f2f2", zorder=0, linewidth=0) for axes in self.panels]
            self._sessions = [
                axes.add_collection(LineCollection([], colors="#9db4cc", linewidths=0.9, linestyles=":"), autolim=False)
                for axes in self.panels
            ]
            self._rolls = [
                axes.add_collection(
                    LineCollection([], colors="#b06a00", linewidths=1.0, linestyles="--"), autolim=False
                )
                for axes in self.panels
            ]
            self._roll_names: list[Any] = []
            self._wicks = price.add_collection(LineCollection([], colors="#5b6670", linewidths=0.8), autolim=False)
            self._bodies = {
                up: price.add_collection(
                    PolyCollection([], facecolors=color, edgecolors="#5b6670", linewidths=0.6), autolim=False
                )
                for up, color in ((True, "white"), (False, "#5b6670"))
            }
            looks = {
                "B": ("^", "#00875a", "bought"), "S": ("v", "#d1242f", "sold"), "X": ("X", "#7d3fc9", "closed by rule"),
            }  # fmt: skip
            self._marks = {
                letter: price.plot(
                    [], [], marker, color=color, markersize=9, markeredgecolor="white", markeredgewidth=0.8,
                    label=label, zorder=5,
                )[0]
                for letter, (marker, color, label) in looks.items()
            }  # fmt: skip
            price.legend(
                handles=list(self._marks.values()), loc="upper left", ncols=3, fontsize=8, frameon=False, borderpad=0.1,
                handletextpad=0.2, columnspacing=1.2,
            )  # fmt: skip
            self._held = {
                sign: position.stairs([0.0], [0, 1], fill=True, color=color)
                for sign, color in ((1, "#40a583"), (-1, "#dc5b63"))
            }
            position.axhline(0.0, color="#888888", linewidth=0.7)
            self._equity = equity.plot([], [], color="#1f5fa8", linewidth=1.3)[0]
            self._cost = cost.plot([], [], color="#8a4b08", linewidth=1.3)[0]

    def draw(self, view: View) -> None:
        """Draw `view` onto the figure's canvas."""
        from matplotlib import style

        with style.context("default"):
            self._update(view)
            self.figure.canvas.draw()

    def _update(self, view: View) -> None:
        n = len(view.close)
        x = np.arange(n)
        price, position, equity, cost = self.panels
        for text, line in zip(self._titles, view.titles, strict=True):
            text.set_text(line)
        price.set_xlim(min(n - BARS, 0) - 0.5, n + 1.5)
        # Labels hang on the bars' own numbers, so that they move with them.
        every = BARS // 5
        ticks = [i for i in range(-view.first % every, n, every) if i >= n - BARS]
        cost.set_xticks(ticks, [view.times[i] for i in ticks])
        for span, axes in zip(self._spans, self.panels, strict=True):
            left = axes.get_xlim()[0]
            span.set_bounds(left, 0.0, max(view.start - left - 0.5, 0.0), 1.0)
        for lines, places in ((self._sessions, view.sessions), (self._rolls, [i for i, _ in view.rolls])):
            for collection, axes in zip(lines, self.panels, strict=True):
                collection.set_transform(axes.get_xaxis_transform())
                collection.set_segments([[(i - 0.5, 0.0), (i - 0.5, 1.0)] for i in places])
        for text in self._roll_names:
            text.remove()
        self._roll_names = [
            price.text(i, 0.02, name, transform=price.get_xaxis_transform(), fontsize=8, color="#b06a00", clip_on=True)
            for i, name in view.rolls
        ]

        low, high = view.price_range
        _limit(price, low, high + 0.08 * (high - low))  # room for the legend
        self._wicks.set_segments(np.stack([np.stack([x, view.low], -1), np.stack([x, view.high], -1)], 1))
        up = view.close >= view.open
        for is_up, collection in self._bodies.items():
            rows = up == is_up
            left, right, bottom, top = x[rows] - 0.35, x[rows] + 0.35, view.open[rows], view.close[rows]
            corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
            collection.set_verts(np.stack([np.stack(corner, -1) for corner in corners], 1))
        for letter, line in self._marks.items():
            placed = [(i, at) for i, at, kind in view.marks if kind == letter]
            line.set_data(*zip(*placed, strict=True)) if placed else line.set_data([], [])

        held = np.nan_to_num(view.position)
        for sign, patch in self._held.items():
            patch.set_data(np.where(held * sign > 0, held, 0.0), np.arange(n + 1) - 0.5, 0.0)
        largest = view.max_contracts
        position.set_ylim(-1.15 * largest, 1.15 * largest)
        position.set_yticks([-largest, 0, largest])
        for line, axes, values in (
            (self._equity, equity, view.equity_usd), (self._cost, cost, view.cost_usd),
        ):  # fmt: skip
            line.set_data(x, values)
            _limit(axes, np.nanmin(values), np.nanmax(values))


class Window:
    """A window of matplotlib's."""

    @classmethod
    def open(cls) -> Window | None:
        """A new window, None where there is no display or no backend that has windows."""
        from matplotlib import pyplot as plt

        try:
            figure = plt.figure()  # by a name, a second environment would get the first one's figure
        except ImportError:  # a backend asked for by name that cannot run here
            return None
        if figure.canvas.required_interactive_framework is None:
            plt.close(figure)
            return None
        return cls(figure)

    def __init__(self, figure: Figure) -> None:
        self._picture = Picture(figure)
        self._clock = Clock()
        figure.canvas.manager.set_window_title("FoxES")
        figure.show()

    def show(self, view_of: Any) -> None:
        """Draw the view of `BARS` bars, unless the user has closed the window."""
        from matplotlib import pyplot as plt

        figure = self._picture.figure
        if plt.fignum_exists(figure.number):
            self._picture.draw(view_of(BARS))
            figure.canvas.flush_events()
            self._clock.wait()

    def close(self) -> None:
        """Close it."""
        from matplotlib import pyplot as plt

        plt.close(self._picture.figure)


class Terminal:
    """Standard output: a chart in place on a terminal, one after another elsewhere."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._begun = False

    def show(self, view_of: Any) -> None:
        """Print the view that fits."""
        out = sys.stdout
        live = out.isatty() and os.environ.get("TERM") != "dumb"
        columns, rows = shutil.get_terminal_size((COLUMNS, 1_000)) if live else (COLUMNS, 1_000)
        columns = max(min(columns, COLUMNS), _LEAST_COLUMNS)
        lines = text_chart(view_of(columns - _LABEL), columns).splitlines()
        if live:
            # Home, each line to its end, and what is below: nothing of another frame is left.
            lines = [line + "\x1b[K" for line in lines[: rows - 1]]
            out.write(("\x1b[H" if self._begun else "\x1b[2J\x1b[H") + _encodable("\n".join(lines), out) + "\n\x1b[J")
        else:
            out.write(_encodable("\n".join(lines), out) + "\n\n")
        out.flush()
        self._begun = True
        if live:
            self._clock.wait()

    def close(self) -> None:
        """Nothing to close."""


class Clock:
    """Keeps frames `FPS` a second apart."""

    def __init__(self) -> None:
        self._next = 0.0

    def wait(self) -> None:
        """Sleep until the next frame is due."""
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + 1.0 / FPS


def text_chart(view: View, columns: int) -> str:
    """`view` as lines of text: high to low of each bar as a column, fills as letters, position, equity and costs.

    Args:
        view: of `columns` − 11 bars at most.
        columns: where lines are cut off.
    """
    n = len(view.close)
    low, high = view.price_range
    levels = 2 * _ROWS  # a character is two levels high
    scale = (levels - 1) / (high - low) if high > low else 0.0
    bottom, top = (np.rint((prices - low) * scale).astype(int) for prices in (view.low, view.high))
    rows = []
    for row in range(_ROWS - 1, -1, -1):
        lower = (bottom <= 2 * row) & (2 * row <= top)
        upper = (bottom <= 2 * row + 1) & (2 * row + 1 <= top)
        rows.append([" ▄▀█"[a + 2 * b] for a, b in zip(lower, upper, strict=True)])
    for index, price, letter in view.marks:
        rows[_ROWS - 1 - int(np.rint((price - low) * scale)) // 2][index] = letter
    axis = ["─"] * n
    for index in view.sessions:
        axis[index] = "┴"
    for index, _ in view.rolls:
        axis[index] = "R"
    if 0 <= view.start < n:
        axis[view.start] = "^"
    labels = {0: high, _ROWS - 1: low}
    chart = [
        f"{f'{labels[i]:,.2f}' if i in labels else '':>{_LABEL - 2}} │{''.join(row)}" for i, row in enumerate(rows)
    ]
    held = np.nan_to_num(view.position) / view.max_contracts
    shorts = [_DOWN_TO[int(np.ceil(-3 * h))] if h < 0 else " " for h in held]
    longs = [_UP_TO[int(np.ceil(8 * h))] if h > 0 else " " for h in held]
    strips = [("long", longs), ("short", shorts), ("equity", _spark(view.equity_usd)), ("costs", _spark(view.cost_usd))]
    first, last = view.times[0], view.times[-1]
    lines = [
        *view.titles,
        *chart,
        f"{'':>{_LABEL - 2}} └{''.join(axis)}",
        *(f"{name:>{_LABEL - 2}}  {''.join(strip)}" for name, strip in strips),
        f"{'':{_LABEL}}{first}{last:>{n - len(first)}}" if n > 2 * len(first) else f"{'':{_LABEL}}{last}",
        f"{'':{_LABEL}}B bought   S sold   X closed by rule   ^ start   ┴ session   R roll",
    ]
    return "\n".join(line[:columns].rstrip() for line in lines) + "\n"


def _spark(values: np.ndarray) -> list[str]:
    """A block a value, between the lowest and the highest; a blank where there is none."""
    known = np.isfinite(values)
    low, high = values[known].min(), values[known].max()
    scale = 7 / (high - low) if high > low else 0.0
    return [_UP_TO[1 + round((v - low) * scale)] if ok else " " for v, ok in zip(values, known, strict=True)]


def _limit(axes: Any, low: float, high: float) -> None:
    room = 0.06 * (high - low) or max(abs(high) * 1e-4, 0.5)
    axes.set_ylim(low - room, high + room)


def _encodable(text: str, out: Any) -> str:
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _usd(amount: float) -> str:
    return f"-${-amount:,.2f}" if amount < 0 else f"${amount:,.2f}"


def _utc(ns: int, style: str) -> str:
    return dt.datetime.fromtimestamp(int(ns) // 1_000_000_000, dt.UTC).strftime(style)
