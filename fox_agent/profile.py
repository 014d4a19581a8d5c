"""Training profiles: TOML files in which every parameter is explicit; unknown keys and wrong types are refused."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fox_env import Game

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# A profile is a project file, and so are the paths in it.
PROJECT_MARKERS = ("pyproject.toml", ".git")
PATHS = ("path", "mbp10_data_dir", "trades_data_dir", "definitions_data_dir", "cache_dir")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Data(_Section):
    """Which market, and how it is cut. Empty strings mean: not given."""

    path: str
    mbp10_data_dir: str
    trades_data_dir: str
    definitions_data_dir: str
    cache_dir: str
    synthetic: Literal["", "planted", "planted_noisy", "martingale", "garch"]
    synthetic_bars: Positive
    synthetic_seed: Count
    symbol: str
    columns: list[str]
    bars: str
    tz: str
    stamp: Literal["", "start", "end"]
    roll: Literal["volume", "calendar", "expiry"]
    hours: Literal["all", "rth"]
    max_bars: Count
    drop_features: list[str]
    train_share: Share
    valid_share: Share
    train_end: str
    valid_end: str

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if bool(self.path) == bool(self.synthetic):
            raise ValueError("expected exactly one of path and synthetic")
        for name in ("mbp10_data_dir", "trades_data_dir", "definitions_data_dir"):
            if self.synthetic and getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with a synthetic market, expected it beside path alone"
                )
        return self


class GameSettings(_Section):
    """The fields of `fox_env.Game`; 0 contracts of depth and a commission of "contract" leave the market's own."""

    max_contracts: Positive
    min_hold_bars: Count
    spread_ticks: NotNegative
    commission_usd_per_side: NotNegative | Literal["contract"]
    fill_rule: Literal["through", "touch"]
    depth_contracts: Count
    initial_equity_usd: Above
    episode_bars: Positive
    flat_at_close: bool
    margin: bool
    mirror_prob: Share
    window: Positive
    shaping_entropy: float
    shaping_hindsight: float
    shaping_micro: float
    shaping_drawdown: float
    hindsight_lookahead: Positive

    def settings(self) -> dict[str, Any]:
        """Keywords for the environments and `fox_env.evaluate`."""
        values = self.model_dump()
        shaping = {n.removeprefix("shaping_"): values.pop(n) for n in list(values) if n.startswith("shaping_")}
        values["shaping"] = {name: value for name, value in shaping.items() if value}
        if values["depth_contracts"] == 0:
            del values["depth_contracts"]
        if values["commission_usd_per_side"] == "contract":
            del values["commission_usd_per_side"]
        return values

    @model_validator(mode="after")
    def _playable(self) -> GameSettings:
        Game(**self.settings())
        return self


class Network(_Section):
    """`fox_agent.network.BranchingNetwork`."""

    bottleneck: Count
    hidden: Annotated[list[Positive], Field(min_length=1)]
    residual: bool
    norm: Literal["rms", "none"]
    num_atoms: Annotated[int, Field(ge=2)]
    num_quantiles: Count
    noisy: bool
    output_scale: Above


class Loss(_Section):
    """`fox_agent.losses.total_loss` and the return it regresses on."""

    gamma: Annotated[float, Field(ge=0, lt=1)]
    n_step: Positive
    c51_alpha_max: Share
    c51_warmup_epochs: Count
    smoothing: Literal["stencil", "uniform", "none"]
    smoothing_strength: Share
    max_per_sample_ce: Above
    iqn_lambda: NotNegative
    iqn_primary_loss: bool
    cql_alpha: NotNegative
    entropy_coefficient: NotNegative
    support: Literal["auto", "unit"]
    reward_normalization: Literal["market", "reward"]


class Replay(_Section):
    """`fox_agent.replay.TransitionReplay`."""

    capacity: Positive
    min_size: Positive
    alpha: NotNegative
    beta_start: NotNegative
    beta_end: NotNegative
    eps: NotNegative


class Exploration(_Section):
    """`fox_agent.exploration.select_actions` and the advantage noise; temperature 0 draws uniformly."""

    epsilon_start: Share
    epsilon_end: Share
    epsilon_steps: Count
    single_branch_share: Share
    temperature: NotNegative
    noise_sigma: NotNegative
    noise_relative: bool


class Collect(_Section):
    """`fox_agent.collect.Collector`."""

    num_envs: Positive
    steps_per_update: Above
    counterfactual_share: Share


class Train(_Section):
    """`fox_agent.trainer.Trainer`."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    epochs: Positive
    updates_per_epoch: Positive
    batch_size: Positive
    learning_rate: Above
    adam_eps: Above
    weight_decay: NotNegative
    gradient_clip_norm: Above
    tau: Annotated[float, Field(gt=0, le=1)]
    tau_start: Annotated[float, Field(gt=0, le=1)]
    tau_anneal_updates: Count
    tau_restart_ratio: Annotated[float, Field(gt=1)]
    early_stopping_epochs: Count
    ofi_start_epoch: Count
    threads: Count


class Gate(_Section):
    """When a trained agent is deployed rather than the flat policy."""

    standard_errors: NotNegative
    min_sessions: Count
    trade_margin: NotNegative


class Profile(_Section):
    """A whole profile, one section a table of the TOML file."""

    data: Data
    game: GameSettings
    network: Network
    loss: Loss
    replay: Replay
    exploration: Exploration
    collect: Collect
    train: Train
    gate: Gate

    @model_validator(mode="after")
    def _fits(self) -> Profile:
        if self.train.batch_size > self.replay.capacity:
            raise ValueError(
                f"train.batch_size is {self.train.batch_size}, expected at most replay.capacity, {self.replay.capacity}"
            )
        if not self.train.batch_size <= self.replay.min_size <= self.replay.capacity:
            raise ValueError(
                f"replay.min_size is {self.replay.min_size}, expected train.batch_size, {self.train.batch_size}, to "
                f"replay.capacity, {self.replay.capacity}"
            )
        finished = self.collect.num_envs * self.loss.n_step
        if finished > self.replay.capacity:
            raise ValueError(
                f"replay.capacity is {self.replay.capacity}, expected at least collect.num_envs × loss.n_step, "
                f"{finished}: one step can finish so many transitions"
            )
        if self.loss.iqn_primary_loss and not self.network.num_quantiles:
            raise ValueError("loss.iqn_primary_loss is true, expected network.num_quantiles above 0")
        return self


def load_profile(path: str | os.PathLike, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Profile:
    """Read a profile.

    Args:
        path: the TOML file.
        overrides: ``"section.key=value"`` strings, the value in TOML, or a mapping of ``"section.key"`` to values.

    Returns:
        The profile, the relative paths of its data section resolved against the project's root: the nearest folder
        above the file that holds a pyproject.toml or a .git.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not TOML, or a key that is missing, unknown or of the wrong type, named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"profile {path} does not exist")
    try:
        values = tomli.loads(path.read_text())
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"profile {path} is not TOML: {error}") from None
    items = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    for key, value in items:
        section, _, name = key.partition(".")
        if not isinstance(values.get(section), dict) or name not in values[section]:
            raise ValueError(f"{key} is not a key of profile {path}, expected section.key as in the file")
        # A whole number for a float is meant as one.
        is_float = isinstance(values[section][name], float)
        values[section][name] = float(value) if is_float and type(value) is int else value
    data = values.get("data")
    for key in PATHS if isinstance(data, dict) else ():
        if isinstance(data.get(key), str) and data[key]:
            data[key] = str((project_root(path) / data[key]).resolve())
    return parse_profile(values, str(path))


def parse_profile(values: Mapping[str, Any], name: str = "profile") -> Profile:
    """Check the nested `values` of a profile; errors call it `name`.

    Raises:
        ValueError: a key that is missing, unknown or of the wrong type, named.
    """
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"][:2])) or "profile"  # a section and a key, whatever lies below
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{name}: {key} is unknown, expected only the keys that a profile has") from None
        if first["type"] == "missing":
            raise ValueError(f"{name}: {key} is missing, every parameter must be there") from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ValueError(f"{name}: {message}") from None
        raise ValueError(f"{name}: {key} is {first['input']!r}, {message[0].lower()}{message[1:]}") from None


def dump_profile(profile: Profile) -> str:
    """The profile as TOML, to be read back by `load_profile`."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)  # TOML shares JSON's strings
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return repr(value)

    tables = []
    for section, values in profile.model_dump().items():
        tables.append("\n".join([f"[{section}]", *(f"{key} = {text(value)}" for key, value in values.items())]))
    return "\n\n".join(tables) + "\n"


def project_root(path: Path) -> Path:
    """The nearest folder above `path` that holds a pyproject.toml or a .git; the file's own folder if there is none."""
    for folder in path.resolve().parents:
        if any((folder / marker).exists() for marker in PROJECT_MARKERS):
            return folder
    return path.resolve().parent


def parse_override(text: str) -> tuple[str, Any]:
    """``section.key=value`` as key and value; what is not TOML is a string.

    Raises:
        ValueError: no equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} is not section.key=value")
    try:
        parsed = tomli.loads(f"x = {value.strip()}")["x"]
    except tomli.TOMLDecodeError:
        parsed = value.strip()
    # Profiles keep dates as strings.
    return key.strip(), parsed.isoformat() if isinstance(parsed, dt.date) else parsed
