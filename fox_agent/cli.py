"""The command line: ``fox train``, ``fox evaluate``, ``fox data``. Bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import datetime as dt
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import fox_env
from fox_agent.agent import Agent
from fox_agent.audit_cli import audit
from fox_agent.data_cli import data_app, named_columns
from fox_agent.profile import Profile, load_profile, parse_override
from fox_agent.trainer import PROFILE_FILE, Trainer, TrainResult
from fox_env import BacktestReport, Market

DEFAULT_PROFILE = "configs/dqn-smoketest.toml"
REPORT_FILE = "report.json"

console = Console()
app = typer.Typer(help="E-mini futures: train and evaluate trading agents.", no_args_is_help=True, add_completion=False)
app.add_typer(data_app, name="data")
app.command()(audit)


@dataclass(frozen=True)
class Run:
    """What a training command was asked for.

    Args:
        profile: the profile, with the command's options in it.
        out: folder of the run.
        device: ``"cpu"`` or a CUDA device.
        resume: go on from the folder's last checkpoint.
    """

    profile: Profile
    out: Path
    device: str
    resume: bool


def load_data(profile: Profile) -> Market:
    """The market that a profile names."""
    data = profile.data
    if data.synthetic:
        return fox_env.synthetic_market(
            data.synthetic, data.synthetic_bars, data.synthetic_seed, drop=data.drop_features
        )
    market = fox_env.load_market(
        data.path, symbol=data.symbol, columns=named_columns(data.columns), bars=data.bars or None, tz=data.tz or None,
        stamp=data.stamp or None, roll=data.roll, hours=data.hours, max_bars=data.max_bars, drop=data.drop_features,
        mbp10=data.mbp10_data_dir or None, trades=data.trades_data_dir or None,
        definitions=data.definitions_data_dir or None, cache=data.cache_dir or None,
    )  # fmt: skip
    console.print(f"{market!r}\nquality: {_counts(market)}", highlight=False)
    return market


def split_data(market: Market, profile: Profile) -> tuple[Market, Market, Market]:
    """Training, validation and test part as a profile cuts them."""
    data = profile.data
    if data.train_end or data.valid_end:
        return market.split(train_end=data.train_end or None, valid_end=data.valid_end or None)
    return market.split(data.train_share, data.valid_share)


def fit(trainer: Trainer, resume: bool = False) -> TrainResult:
    """Train with a progress bar and a line an epoch. Ctrl-C keeps a checkpoint and exits."""
    train = trainer.profile.train
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console.print(
        f"{trainer.replay.bytes_per_transition:.0f} bytes a transition, {train.updates_per_epoch} updates an epoch"
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("updates", total=train.epochs * train.updates_per_epoch)

        def show(metrics: dict[str, Any]) -> None:
            progress.console.print(
                f"epoch {metrics['epoch']:>3}  loss {metrics['loss']:.3f}  Q-gap {metrics['q_gap']:.3f}  "
                f"validation net {metrics['valid_net_pnl_usd']:>10,.0f} USD (t {metrics['valid_t']:.1f})  "
                f"{metrics['verdict']}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

        before = signal.signal(signal.SIGINT, lambda *_: trainer.stop())
        try:
            return trainer.fit(
                resume=resume, on_epoch=show, on_update=lambda t: progress.update(task, completed=t.update_count)
            )
        except KeyboardInterrupt:
            if trainer.out is not None:
                console.print(f"stopped; go on with --resume --out {trainer.out}", soft_wrap=True)
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGINT, before)


def compare(report: BacktestReport) -> None:
    """Print what a rejected agent would have made, and what share of the oracle's profit the agent made, where there
    is an oracle and it trades."""
    candidate = report.policies.get("candidate")
    if candidate:
        console.print(
            f"candidate: the agent that the gate rejected; it would have made {candidate['net_pnl_usd']:,.0f} USD here",
            soft_wrap=True,
        )
    oracle = report.policies.get("oracle")
    if oracle and oracle["trades"]:
        mine = report.policies["agent"]
        share = mine["expected_net_pnl_points"] / oracle["expected_net_pnl_points"]
        console.print(
            f"expected net profit: {mine['expected_net_pnl_points']:,.0f} points, {share:.0%} of the oracle's "
            f"{oracle['expected_net_pnl_points']:,.0f}; realized {mine['net_pnl_points']:,.0f} points",
            soft_wrap=True,
        )  # fmt: skip


def train_run(run: Run) -> None:
    """Load, split, train, test."""
    market = load_data(run.profile)
    train, valid, test_part = split_data(market, run.profile)
    trainer = Trainer(run.profile, train, valid, out=run.out, device=run.device)
    result = fit(trainer, run.resume)
    console.print(result.verdict, soft_wrap=True)
    report = fox_env.evaluate(
        result.agent, test_part, seed=run.profile.train.seed, device=run.device, others=result.agent.rejected,
        **run.profile.game.settings(),
    )  # fmt: skip
    report.print()
    compare(report)
    report.save(run.out / REPORT_FILE)
    console.print(f"saved in {run.out}", soft_wrap=True)


def training_command(body: Callable[[Run], None]) -> Callable[..., None]:
    """A command with the options of training, which calls `body` with what they say."""

    def train(
        profile: Annotated[
            Path | None, typer.Option(help=f"TOML file; {DEFAULT_PROFILE} if not given, with --resume the run's own")
        ] = None,
        data: Annotated[
            Path | None, typer.Option(help="file, directory or glob of bars; the profile's market if not given")
        ] = None,
        mbp10: Annotated[Path | None, typer.Option(help="book records of the same market, for order flow")] = None,
        trades: Annotated[Path | None, typer.Option(help="trades of the same market")] = None,
        definitions: Annotated[Path | None, typer.Option(help="definitions, to check the contract's terms")] = None,
        cache: Annotated[Path | None, typer.Option(help="directory for built markets")] = None,
        symbol: Annotated[str | None, typer.Option(help="root, contract, parent or continuous symbol")] = None,
        bars: Annotated[str | None, typer.Option(help="1s, 1m, 5m, 1h, 1d or vol:N")] = None,
        tz: Annotated[str | None, typer.Option(help="time zone of stamps without an offset")] = None,
        stamp: Annotated[str | None, typer.Option(help="start or end: which end of a bar its stamp names")] = None,
        columns: Annotated[
            list[str] | None,
            typer.Option(help="meaning=column, any number of them; or all names in order, with commas between"),
        ] = None,
        roll: Annotated[str | None, typer.Option(help="volume, calendar or expiry")] = None,
        hours: Annotated[str | None, typer.Option(help="all or rth")] = None,
        max_bars: Annotated[int | None, typer.Option(help="keep the first that many bars, 0 keeps all")] = None,
        train_end: Annotated[str | None, typer.Option(help="first date that is not trained on")] = None,
        valid_end: Annotated[str | None, typer.Option(help="first date of the test part")] = None,
        seed: Annotated[int | None, typer.Option(help="of everything that is drawn")] = None,
        device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
        out: Annotated[Path | None, typer.Option(help="folder of the run; a new one under runs/ if not given")] = None,
        set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, any number of them")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")] = False,
    ) -> None:
        """Train an agent, and test what it learned on the part it has not seen."""
        _check_device(device)
        if resume and out is None:
            raise ValueError("--resume needs --out, the folder of the run")
        paths = {
            "path": data, "mbp10_data_dir": mbp10, "trades_data_dir": trades, "definitions_data_dir": definitions,
            "cache_dir": cache,
        }  # fmt: skip
        given = {
            **{f"data.{key}": None if path is None else str(Path.cwd() / path) for key, path in paths.items()},
            "data.symbol": symbol, "data.bars": bars, "data.tz": tz, "data.stamp": stamp,
            "data.columns": columns or None, "data.roll": roll, "data.hours": hours, "data.max_bars": max_bars,
            "data.train_end": train_end, "data.valid_end": valid_end, "train.seed": seed,
        }  # fmt: skip
        overrides = {key: value for key, value in given.items() if value is not None}
        if data is not None:
            overrides["data.synthetic"] = ""
        if profile is None and resume and (out / PROFILE_FILE).exists():
            profile = out / PROFILE_FILE
        file = _profile_file(profile or Path(DEFAULT_PROFILE))
        loaded = load_profile(file, {**overrides, **dict(map(parse_override, set_ or ()))})
        if out is None:
            out = Path("runs") / f"{file.stem}-{dt.datetime.now():%Y%m%d-%H%M%S}"
        body(Run(loaded, out, device, resume))

    return train


app.command("train")(training_command(train_run))


@app.command()
def evaluate(
    agent: Annotated[Path, typer.Option(help="folder of an agent, such as runs/…/best")],
    data: Annotated[Path, typer.Option(help="file, directory or glob of bars")],
    mbp10: Annotated[Path | None, typer.Option(help="book records of the same market, for order flow")] = None,
    trades: Annotated[Path | None, typer.Option(help="trades of the same market")] = None,
    definitions: Annotated[Path | None, typer.Option(help="definitions, to check the contract's terms")] = None,
    cache: Annotated[Path | None, typer.Option(help="directory for built markets")] = None,
    symbol: str = "ES",
    bars: str | None = None,
    tz: str | None = None,
    stamp: str | None = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(help="meaning=column, any number of them; or all names in order, with commas between"),
    ] = None,
    roll: str = "volume",
    hours: str = "all",
    max_bars: int = 0,
    seed: int = 0,
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON file for the report")] = None,
) -> None:
    """Play a trained agent once through a market."""
    _check_device(device)
    loaded = Agent.load(agent, device)
    market = fox_env.load_market(
        data, symbol=symbol, bars=bars, tz=tz, stamp=stamp, columns=named_columns(columns), roll=roll, hours=hours,
        max_bars=max_bars, mbp10=mbp10, trades=trades, definitions=definitions, cache=cache,
    )  # fmt: skip
    report = fox_env.evaluate(
        loaded, loaded.prepare(market), seed=seed, device=device, others=loaded.rejected, **loaded.settings["game"]
    )
    report.print()
    compare(report)
    if out is not None:
        report.save(out)


def run_command(command: Callable[..., Any]) -> None:
    """Run a typer app or a function with options; bad input is one sentence on standard error and exit code 2."""
    try:
        typed = command if isinstance(command, typer.Typer) else _single(command)
        typed(standalone_mode=True)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _single(command: Callable[..., Any]) -> typer.Typer:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(command)
    return single


def main() -> None:
    """Entry point of ``fox``."""
    app.pretty_exceptions_enable = False
    run_command(app)


def _check_device(name: str) -> None:
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is {name!r}, expected cpu or a CUDA device of this machine: {reason}") from None


def _profile_file(profile: Path) -> Path:
    """The file itself, or, from another directory, the one of that name in the project."""
    beside = Path(__file__).resolve().parent.parent / profile
    return beside if not profile.exists() and beside.exists() else profile


def _counts(market: Market) -> str:
    return (
        ", ".join(f"{name} {value:,}" for name, value in market.quality.items() if isinstance(value, int) and value)
        or "clean"
    )
