"""What a back-test found: figures of each policy, as a table and as JSON."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fox_env import metrics
from fox_env.files import write_atomic

if TYPE_CHECKING:
    from rich.table import Table

    from fox_env.backtest import Record

SCHEMA = 1
ORDER_TYPES = ("market", "limit", "ioc")
_WIDTH = 120


def policy_figures(record: Record, seed: int = 0, trials: int = 1, resamples: int = 1_000) -> dict[str, Any]:
    """The figures of one policy, ready for JSON: numbers, strings, lists, and None where a figure is not defined.

    Args:
        record: what the policy did.
        seed: of the bootstrap.
        trials: how many policies this one is the best of.
        resamples: of the bootstrap; 0 leaves ``sharpe_interval`` undefined, and its time unspent.

    Returns:
        ============================================ ==============================================================
        ``net_pnl_points``, ``net_pnl_usd``          profit after costs; a point is one contract moving one point
        ``expected_net_pnl_points``                  Σ position × drift − costs, where the drift is known
        ``gross_pnl_points``, ``gross_pnl_usd``      profit before costs
        ``cost_points``, ``cost_usd``                gross − net
        ``cost_breakdown_usd``                       commission, spread and slippage of own orders; rolls; forced closes
        ``sharpe``, ``sortino``, ``calmar``          of session profits, annualized by 252 sessions
        ``sharpe_interval``                          95 % by the stationary bootstrap
        ``probabilistic_sharpe``                     probability that the true Sharpe ratio is positive
        ``deflated_sharpe``                          the same, given `trials`
        ``edge_t``                                   net profit over its session-block standard error
        ``max_drawdown_usd``                         largest fall from a peak, on closes; when it began and ended
        ``trades``                                   positions opened, from flat or by a reversal
        ``hit_rate``                                 share of them with a net profit
        ``mean_holding_bars``                        closes that a position was held at, a trade
        ``turnover_contracts``                       contracts bought and sold, by own orders, force and rolls
        ``mean_abs_exposure``                        mean of |position| / max_contracts
        ``exposure_histogram``                       share of bars by signed contracts
        ``fills_by_order_type``                      orders filled at least in part
        ``margin_calls``, ``lanes``                  lanes that a margin call ended, of how many
        ``sessions``, ``bars``                       played
        ``session_pnl_usd``                          net profit of each session
        ============================================ ==============================================================
    """
    market = record.lanes.market
    dollars = market.contract.multiplier
    pnl = record.session_pnl_usd
    ratio = float(metrics.session_sharpe(pnl))
    moments = (ratio, len(pnl), *metrics.shape_moments(pnl))
    path = np.concatenate([[0.0], np.cumsum(record.net)]) * dollars
    depth, peak, trough = metrics.max_drawdown(path)
    closes = np.concatenate([record.lanes.bar[:1], record.lanes.bar + 1])
    trades = record.trades
    count = len(trades.net)
    held, bars_held = np.unique(record.position, return_counts=True)
    fills = np.bincount(record.action[record.filled != 0, 2], minlength=3)
    turnover = np.abs(record.filled).sum() + np.abs(record.forced).sum() + 2 * record.rolled.sum()
    net, gross, cost = (float(points.sum()) for points in (record.net, record.gross, record.cost))
    expected = record.expected_net_points()
    figures = {
        "net_pnl_points": net,
        "net_pnl_usd": net * dollars,
        **({} if expected is None else {"expected_net_pnl_points": expected}),
        "gross_pnl_points": gross,
        "gross_pnl_usd": gross * dollars,
        "cost_points": cost,
        "cost_usd": cost * dollars,
        "cost_breakdown_usd": {part: points.sum() * dollars for part, points in record.costs.items()},
        "sharpe": metrics.sharpe(pnl),
        "sharpe_interval": metrics.sharpe_interval(pnl, seed, resamples),
        "sortino": metrics.sortino(pnl),
        "calmar": metrics.calmar(pnl, depth),
        "probabilistic_sharpe": metrics.probabilistic_sharpe(*moments),
        "deflated_sharpe": metrics.deflated_sharpe(*moments, trials),
        "edge_t": record.edge_t,
        "max_drawdown_usd": depth,
        "max_drawdown_start": iso_time(market.ts[closes[peak]]) if depth else None,
        "max_drawdown_end": iso_time(market.ts[closes[trough]]) if depth else None,
        "trades": count,
        "hit_rate": np.count_nonzero(trades.net > 0) / count if count else None,
        "mean_holding_bars": trades.bars.mean() if count else None,
        "turnover_contracts": turnover,
        "mean_abs_exposure": np.abs(record.position).mean() / record.game.max_contracts,
        "exposure_histogram": {
            str(contracts): bars / len(record) for contracts, bars in zip(held, bars_held, strict=True)
        },
        "fills_by_order_type": dict(zip(ORDER_TYPES, fills, strict=True)),
        "margin_calls": record.margin_calls,
        "lanes": len(record.lanes),
        "sessions": len(pnl),
        "bars": len(record),
        "session_pnl_usd": pnl,
    }
    return to_plain(figures)


@dataclass(frozen=True, repr=False)
class BacktestReport:
    """What a back-test found.

    Attributes:
        policies: figures by policy, `policy_figures`; the evaluated one first.
        provenance: market, settings, seed, versions.
        records: what each policy did, step by step.
    """

    policies: Mapping[str, dict[str, Any]]
    provenance: Mapping[str, Any]
    records: Mapping[str, Record] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """``{"schema": 1, "policies": …, "provenance": …}`` of plain values; no NaN, None in its place."""
        return to_plain({"schema": SCHEMA, "policies": self.policies, "provenance": self.provenance})

    def save(self, path: str | os.PathLike) -> None:
        """Write `to_dict` as JSON, atomically."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        write_atomic(path, lambda partial: partial.write_text(text, encoding="utf-8"))

    def print(self) -> None:
        """Print the table."""
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        console.print(self._table())

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        console.print(self._table())
        return console.file.getvalue()

    def __repr__(self) -> str:
        net = ", ".join(f"{name} {_money(figures['net_pnl_usd'])}" for name, figures in self.policies.items())
        return f"BacktestReport(net USD: {net})"

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        of = self.provenance
        table = Table(
            title=f"{of['contract']}, {of['first'][:10]} to {of['last'][:10]}: {of['bars']:,} bars, "
            f"{of['sessions']:,} sessions, {of['lanes']} lanes",
            caption=_game_line(of["game"]),
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("", no_wrap=True)
        for name in self.policies:
            table.add_column(name, justify="right")
        for section in _ROWS:
            for label, show in section:
                cells = [show(figures) for figures in self.policies.values()]
                if any(cell != _NOTHING for cell in cells):
                    table.add_row(label, *cells)
            table.add_section()
        return table


_NOTHING = "–"


def _shown(key: str, form: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
    def show(figures: dict[str, Any]) -> str:
        value: Any = figures
        for part in key.split("."):
            value = value.get(part)
        return _NOTHING if value is None else form(value)

    return show


def _money(value: float) -> str:
    return f"{value:,.0f}" if round(value) else "0"


def _side(sign: int) -> Callable[[dict[str, Any]], str]:
    def show(figures: dict[str, Any]) -> str:
        shares = figures["exposure_histogram"].items()
        return _percent(sum(share for contracts, share in shares if np.sign(int(contracts)) == sign))

    return show


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _interval(ends: list[float | None]) -> str:
    return _NOTHING if None in ends else f"{ends[0]:.1f}…{ends[1]:.1f}"


def _day(text: str) -> str:
    return text[:10]


def _game_line(game: Mapping[str, Any]) -> str:
    rate, dollars = game["commission_bps_round_trip"], game["commission_usd_per_side"]
    fee = (
        f"{rate:g} bp a round trip"
        if rate is not None
        else "contract's fees"
        if dollars is None
        else f"${dollars:g} a side"
    )
    return (
        f"Up to {game['max_contracts']} contracts, hold {game['min_hold_bars']} bars, "
        f"spread {game['spread_ticks']:g} tick, {fee}, fill rule {game['fill_rule']}.\n"
        f"Ratios are annualized by {metrics.SESSIONS_PER_YEAR} sessions."
    )


_ROWS: tuple[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...], ...] = (
    (
        ("Net P&L, USD", _shown("net_pnl_usd", _money)),
        ("Net P&L, points", _shown("net_pnl_points", "{:,.1f}".format)),
        ("  expected", _shown("expected_net_pnl_points", "{:,.1f}".format)),
        ("Gross P&L, USD", _shown("gross_pnl_usd", _money)),
        ("Costs, USD", _shown("cost_usd", _money)),
        ("  commission", _shown("cost_breakdown_usd.commission", _money)),
        ("  spread, slippage", _shown("cost_breakdown_usd.spread_slippage", _money)),
        ("  rolls", _shown("cost_breakdown_usd.roll", _money)),
        ("  forced closes", _shown("cost_breakdown_usd.forced", _money)),
    ),
    (
        ("Sharpe", _shown("sharpe", "{:.2f}".format)),
        ("  95 % interval", _shown("sharpe_interval", _interval)),
        ("Sortino", _shown("sortino", "{:.2f}".format)),
        ("Calmar", _shown("calmar", "{:.2f}".format)),
        ("P(Sharpe > 0)", _shown("probabilistic_sharpe", "{:.3f}".format)),
        ("  deflated", _shown("deflated_sharpe", "{:.3f}".format)),
        ("Net P&L / std. error", _shown("edge_t", "{:.1f}".format)),
        ("Max. drawdown, USD", _shown("max_drawdown_usd", _money)),
        ("  from", _shown("max_drawdown_start", _day)),
        ("  to", _shown("max_drawdown_end", _day)),
    ),
    (
        ("Trades", _shown("trades", "{:,}".format)),
        ("Hit rate", _shown("hit_rate", _percent)),
        ("Mean holding, bars", _shown("mean_holding_bars", "{:,.1f}".format)),
        ("Contracts traded", _shown("turnover_contracts", "{:,}".format)),
        ("Mean |exposure|", _shown("mean_abs_exposure", _percent)),
        ("  bars short", _side(-1)),
        ("  bars flat", _side(0)),
        ("  bars long", _side(1)),
        ("Fills: market", _shown("fills_by_order_type.market", "{:,}".format)),
        ("  limit", _shown("fills_by_order_type.limit", "{:,}".format)),
        ("  IOC", _shown("fills_by_order_type.ioc", "{:,}".format)),
        ("Margin calls", _shown("margin_calls", "{:,}".format)),
    ),
)


def iso_time(ns: int) -> str:
    """UTC nanoseconds as ISO text, to the second."""
    return dt.datetime.fromtimestamp(int(ns) // 1_000_000_000, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_plain(value: Any) -> Any:
    """`value` in the types of JSON: arrays as lists, numpy's numbers as Python's, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)
