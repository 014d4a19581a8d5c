"""E-mini S&P 500 futures as a Gymnasium environment: markets, the game, evaluation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import gymnasium as gym

if TYPE_CHECKING:
    from fox_env.backtest import BacktestReport as BacktestReport
    from fox_env.backtest import evaluate as evaluate
    from fox_env.contracts import CONTRACTS as CONTRACTS
    from fox_env.contracts import Contract as Contract
    from fox_env.data.features import Feature as Feature
    from fox_env.data.load import load_market as load_market
    from fox_env.data.synthetic import synthetic_market as synthetic_market
    from fox_env.engine import Game as Game
    from fox_env.gym_env import FoxES as FoxES
    from fox_env.gym_env import FoxESDiscrete as FoxESDiscrete
    from fox_env.leaks import AuditReport as AuditReport
    from fox_env.leaks import audit as audit
    from fox_env.market import Market as Market
    from fox_env.torchrl_env import FoxESTorchEnv as FoxESTorchEnv
    from fox_env.vector_env import FoxESVectorEnv as FoxESVectorEnv

# Loaded on first use, so that importing the package costs nothing that is not needed.
_PUBLIC = {
    "AuditReport": "leaks", "audit": "leaks", "BacktestReport": "backtest", "evaluate": "backtest",
    "CONTRACTS": "contracts", "Contract": "contracts", "Feature": "data.features", "load_market": "data.load",
    "synthetic_market": "data.synthetic", "Game": "engine", "FoxES": "gym_env", "FoxESDiscrete": "gym_env",
    "Market": "market", "FoxESTorchEnv": "torchrl_env", "FoxESVectorEnv": "vector_env",
}  # fmt: skip
__all__ = sorted(_PUBLIC)

for _id, _kind in (("FoxES-v0", ""), ("FoxES-Discrete-v0", "Discrete")):
    gym.register(
        id=_id,
        entry_point=f"fox_env.gym_env:FoxES{_kind}",
        vector_entry_point=f"fox_env.vector_env:FoxES{_kind}VectorEnv",
        disable_env_checker=True,  # the tests run the checkers; the wrapper would cost every step
    )


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fox_env' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"fox_env.{_PUBLIC[name]}"), name)
    except AttributeError as error:
        # `from fox_env import name` would say that there is no such name, and hide what went wrong.
        raise ImportError(f"fox_env.{_PUBLIC[name]} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
