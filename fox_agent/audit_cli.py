"""``fox audit``: look for leaks in a market's bars and features."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

import fox_env
from fox_agent.data_cli import loading
from fox_env import Feature, Market


@loading
def audit(
    load: Callable[..., Market],
    features: Annotated[
        str | None, typer.Option(help="module:attribute, a list of features in place of the default ones")
    ] = None,
    finer: Annotated[Path | None, typer.Option(help="shorter bars of the same market, to compare prices with")] = None,
    seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", help="JSON file for the report")] = None,
) -> None:
    """Look for leaks in bars, features and the game on them: a line a check, exit code 1 if any fails."""
    from fox_env.contracts import get_contract
    from fox_env.data.load import load_segments
    from fox_env.data.rolls import Segment
    from fox_env.data.sources import symbol_root
    from fox_env.files import write_atomic
    from fox_env.market import build_market

    (path,), options = load.args, load.keywords
    contract = get_contract(symbol_root(options["symbol"]))
    chosen = None if features is None else _features(features)
    segments, interval, quality, provenance = load_segments(path, contract=contract, **options)

    def build(chain: Sequence[Segment]) -> Market:
        return build_market(
            chain, contract, interval, hours=options["hours"], features=chosen, quality=quality, provenance=provenance
        )

    shorter = None
    if finer is not None:
        kept = ("symbol", "tz", "stamp", "columns", "roll", "hours")
        shorter = fox_env.load_market(finer, **{name: options[name] for name in kept})
    report = fox_env.audit(segments, build, finer=shorter, seed=seed)
    for check in report.checks:
        print(f"{check.status:8} {check.name:20} {check.finding}")
    if json_ is not None:
        write_atomic(json_, lambda partial: partial.write_text(json.dumps(report.to_dict(), indent=2)))
    if not report.passed:
        raise typer.Exit(1)


def _features(text: str) -> list[str | Feature]:
    """Features by ``module:attribute``, the module being in the working directory or installed."""
    name, _, attribute = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--features is {text!r}, expected module:attribute ({error})") from None
    finally:
        sys.path.pop(0)
    if isinstance(found, Feature):
        return [found]
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"--features {text} is of type {type(found).__name__}, expected a list of names and Features")
    return list(found)
