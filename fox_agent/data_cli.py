"""``fox data``: download, make, build and describe markets."""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import fox_env
from fox_env import Market

data_app = typer.Typer(help="Markets: download, make, build and describe them.", no_args_is_help=True)
console = Console()


def loading(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of loading a market, whose first argument is called with more of `load_market`'s."""

    def options(
        data: Annotated[Path, typer.Argument(help="file, directory or glob: DBN, CSV, JSON or Parquet")],
        symbol: Annotated[str, typer.Option(help="root, contract, parent or continuous symbol")] = "ES",
        bars: Annotated[str | None, typer.Option(help="1s, 1m, 5m, 1h, 1d or vol:N; as they are if not given")] = None,
        tz: Annotated[str | None, typer.Option(help="time zone of stamps without an offset")] = None,
        stamp: Annotated[str | None, typer.Option(help="start or end: which end of a bar its stamp names")] = None,
        columns: Annotated[
            list[str] | None,
            typer.Option(help="meaning=column, any number of them; or all names in order, with commas between"),
        ] = None,
        roll: Annotated[str, typer.Option(help="volume, calendar or expiry")] = "volume",
        hours: Annotated[str, typer.Option(help="all or rth")] = "all",
        max_bars: Annotated[int, typer.Option(help="keep the first that many bars, 0 keeps all")] = 0,
        mbp10: Annotated[Path | None, typer.Option(help="books of the same market, for order flow and quotes")] = None,
        trades: Annotated[Path | None, typer.Option(help="trades of the same market")] = None,
        definitions: Annotated[Path | None, typer.Option(help="definitions, to check the contract's terms")] = None,
    ) -> None:
        pass

    shared = dict(inspect.signature(options).parameters)
    own = {name: value for name, value in inspect.signature(command).parameters.items() if name != "load"}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in shared}
        chosen["columns"] = named_columns(chosen["columns"])
        load = functools.partial(fox_env.load_market, chosen.pop("data"), **chosen)
        command(load, **given)

    # Typer reads both, and eagerly: an annotation that is still a string would lose its option.
    hints = get_type_hints(options, include_extras=True) | get_type_hints(command, include_extras=True)
    every = shared | own
    run.__annotations__ = {name: hints[name] for name in every}
    run.__signature__ = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]) for name, p in every.items()]
    )
    return run


@data_app.command()
def fetch(
    out: Annotated[Path, typer.Argument(help="directory, in which the symbol gets one of its own")],
    symbol: Annotated[str, typer.Option(help="parent (ES.FUT), continuous (ES.c.0) or raw symbol (ESH4)")],
    schema: Annotated[str, typer.Option(help="ohlcv-1s, ohlcv-1m, …, trades, tbbo, mbp-1, mbp-10, definition")],
    start: Annotated[str, typer.Option(help="first UTC date")],
    end: Annotated[str, typer.Option(help="UTC date after the last")],
    dataset: Annotated[str, typer.Option(help="Databento's name of the feed")] = "GLBX.MDP3",
    stype: Annotated[str, typer.Option(help="parent, continuous or raw_symbol; told by the symbol's form")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="do not ask whether the cost is all right")] = False,
) -> None:
    """Download from Databento what is not there yet, with the key in DATABENTO_API_KEY. Shows the cost first."""
    from fox_env.data.fetch import Fetcher, Request

    request = Request(symbol, schema, _date("start", start), _date("end", end), dataset, stype)
    fetcher = Fetcher(warn=lambda text: _say(f"warning: {text}"))
    plan = fetcher.plan(out, request)
    folder = out / symbol
    if not plan.missing:
        _say(f"all {plan.whole} files are in {folder}")
        return
    _say(
        f"{len(plan.missing)} files to download, {plan.whole} are there: {plan.records:,} records, "
        f"{plan.bytes / 1e6:,.1f} MB uncompressed, estimated cost {plan.cost_usd:,.2f} USD"
    )
    if not yes:
        typer.confirm("Download?", abort=True)
    done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("files", total=len(plan.missing))
            for done, _ in enumerate(fetcher.download(plan), start=1):
                progress.update(task, completed=done)
    except KeyboardInterrupt:
        _say(f"stopped after {done} of {len(plan.missing)} files; the same command goes on")
        raise typer.Exit(130) from None
    _say(f"{done} files in {folder}")


@data_app.command()
def synth(
    out: Annotated[Path, typer.Argument(help="directory for the DBN file")],
    kind: Annotated[str, typer.Option(help="planted, planted_noisy, martingale or garch")] = "planted",
    bars: Annotated[int, typer.Option(help="number of bars")] = 350_000,
    interval: Annotated[str | None, typer.Option(help="1s, 1m, 1h or 1d; of ticks also 5m; 1m if not given")] = None,
    schema: Annotated[
        str | None, typer.Option(help="ohlcv-1s, -1m, -1h, -1d, trades, mbp-10, …; bars of --interval if not given")
    ] = None,
    seed: int = 0,
) -> None:
    """Write a synthetic market as Databento's DBN: a continuous series of bars, or the ticks that make them up."""
    from fox_env.data.dbn_write import write_synthetic

    if schema is not None and schema.startswith("ohlcv-") and interval not in (None, schema.removeprefix("ohlcv-")):
        raise ValueError(f"--interval is {interval} and --schema is {schema}, expected one of them or the same bars")
    schema = schema or f"ohlcv-{interval or '1m'}"
    file = out / "ES.FUT" / f"{kind}-{seed}.{schema}.dbn.zst"
    with _waiting(f"writing {file.name}"):
        count = write_synthetic(file, kind, bars, seed, schema=schema, interval=interval or "1m")
    _say(f"{count:,} {'bars' if schema.startswith('ohlcv-') else f'{schema} records'} in {file}")


@data_app.command()
@loading
def build(
    load: Callable[..., Market],
    cache: Annotated[Path, typer.Option(help="directory of built markets")],
) -> None:
    """Build a market into the cache, or open it there."""
    began = time.time()
    with _waiting("building"):
        market = load(cache=cache)
    seconds = time.time() - began
    file = _mapped_file(market.ts)
    verb = "built" if file.stat().st_mtime >= began else "opened"
    _say(f"{market!r}\n{verb} in {seconds:.2f} s: {file}, {file.stat().st_size / 1e6:,.1f} MB")


@data_app.command()
@loading
def info(
    load: Callable[..., Market],
    cache: Annotated[Path | None, typer.Option(help="directory of built markets")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG file for a chart")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="JSON file for the same facts")] = None,
) -> None:
    """Describe a market: range, contracts and rolls, sessions, gaps, quality, features."""
    from fox_env.data.describe import WIDTH, describe, draw_chart, print_description
    from fox_env.files import write_atomic

    with _waiting("loading"):
        market = load(cache=cache)
    about = describe(market)
    written = []
    if chart is not None:
        draw_chart(market, chart)
        written.append(f"chart in {chart}")
    if json_ is not None:
        write_atomic(json_, lambda partial: partial.write_text(json.dumps(about, indent=2)))
        written.append(f"facts in {json_}")
    _say(repr(market))
    print_description(about, Console(width=min(console.width, WIDTH) if console.is_terminal else WIDTH))
    for line in written:
        _say(line)


def named_columns(given: Sequence[str] | None) -> Mapping[str, str | int] | Sequence[str] | None:
    """What `load_market` takes as columns, of ``meaning=column`` texts or of all names in order.

    Raises:
        ValueError: one of several texts has no equals sign, others have.
    """
    if not given:
        return None
    if not any("=" in text for text in given):
        return given[0].split(",") if len(given) == 1 else list(given)
    pairs = [text.partition("=") for text in given]
    wrong = [text for text, (_, sign, column) in zip(given, pairs, strict=True) if not (sign and column)]
    if wrong:
        raise ValueError(f"columns is {wrong[0]!r}, expected meaning=column, such as close=Last")
    return {name: int(column) if column.isdecimal() else column for name, _, column in pairs}


def _date(name: str, text: str) -> dt.date:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--{name} is {text!r}, expected a date such as 2023-01-31") from None


def _mapped_file(array: np.ndarray) -> Path:
    """The file that an array of the cache is mapped from."""
    while not isinstance(array, np.memmap):
        array = array.base
    return Path(array.filename)


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _waiting(what: str) -> Progress:
    """A spinner with the time, for work of unknown length."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(what, total=None)
    return progress
