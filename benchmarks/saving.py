"""Where the benchmarks keep what they printed."""

from __future__ import annotations

from pathlib import Path


def publish(report: str, name: str | None) -> None:
    """Print a report, and keep it as ``benchmarks/results/name.txt`` if it is to have a name."""
    print(report, end="")
    if name:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        (results / f"{name}.txt").write_text(report)
