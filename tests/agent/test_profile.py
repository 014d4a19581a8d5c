"""Profiles: every field arrives, nothing else is taken, and paths belong to the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli

import fox_env
from fox_agent.profile import Profile, dump_profile, load_profile, parse_override, parse_profile
from fox_env.engine import game_of
from tests.agent.tiny import SMOKETEST

DEFAULT = tomli.loads(SMOKETEST.read_text())

# Another value for every field there is.
OTHER: dict[str, dict[str, Any]] = {
    "data": {
        "path": "/data/ES.FUT", "mbp10_data_dir": "/data/mbp10", "trades_data_dir": "/data/trades",
        "definitions_data_dir": "/data/definitions", "cache_dir": "/cache", "synthetic": "", "synthetic_bars": 123,
        "synthetic_seed": 4, "symbol": "NQ", "columns": ["time", "close"], "bars": "vol:500",
        "tz": "America/Chicago", "stamp": "end", "roll": "calendar", "hours": "rth", "max_bars": 99,
        "drop_features": ["rsi", 'odd "name"'], "train_share": 0.5, "valid_share": 0.25, "train_end": "2020-01-01",
        "valid_end": "2021-01-01",
    },
    "game": {
        "max_contracts": 3, "min_hold_bars": 7, "spread_ticks": 2.5, "commission_usd_per_side": 1.25,
        "fill_rule": "touch", "depth_contracts": 5, "initial_equity_usd": 5e4, "episode_bars": 77,
        "flat_at_close": True, "margin": False, "mirror_prob": 0.25, "window": 3, "shaping_entropy": 0.1,
        "shaping_hindsight": 0.2, "shaping_micro": -0.3, "shaping_drawdown": 0.4, "hindsight_lookahead": 11,
    },
    "network": {
        "bottleneck": 0, "hidden": [7, 8, 9], "residual": True, "norm": "rms", "num_atoms": 21, "num_quantiles": 5,
        "noisy": True, "output_scale": 0.3,
    },
    "loss": {
        "gamma": 0.5, "n_step": 4, "c51_alpha_max": 0.5, "c51_warmup_epochs": 3, "smoothing": "uniform",
        "smoothing_strength": 0.01, "max_per_sample_ce": 40.0, "iqn_lambda": 0.5, "iqn_primary_loss": False,
        "cql_alpha": 0.1, "entropy_coefficient": 0.001, "support": "unit", "reward_normalization": "reward",
    },
    "replay": {
        "capacity": 999, "min_size": 555, "alpha": 0.7, "beta_start": 0.5, "beta_end": 1.0, "eps": 1e-3,
    },
    "exploration": {
        "epsilon_start": 0.9, "epsilon_end": 0.05, "epsilon_steps": 10, "single_branch_share": 0.4,
        "temperature": 0.2, "noise_sigma": 0.3, "noise_relative": False,
    },
    "collect": {"num_envs": 17, "steps_per_update": 0.25, "counterfactual_share": 0.75},
    "train": {
        "seed": 8, "epochs": 5, "updates_per_epoch": 44, "batch_size": 33, "learning_rate": 2e-5, "adam_eps": 1e-8,
        "weight_decay": 0.5, "gradient_clip_norm": 2.0, "tau": 0.01, "tau_start": 0.02, "tau_anneal_updates": 6,
        "tau_restart_ratio": 9.0, "early_stopping_epochs": 2, "ofi_start_epoch": 3, "threads": 0,
    },
    "gate": {"standard_errors": 2.0, "min_sessions": 7, "trade_margin": 0.1},
}  # fmt: skip
FIELDS = [(section, key) for section, fields in DEFAULT.items() for key in fields]


def write(path: Path, values: dict[str, dict[str, Any]]) -> Path:
    """The values as TOML, with JSON's notation, which TOML shares for these."""
    lines = []
    for section, fields in values.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    path.write_text("\n".join(lines))
    return path


def changed(section: str, key: str, value: Any) -> dict[str, dict[str, Any]]:
    return DEFAULT | {section: DEFAULT[section] | {key: value}}


# --- R25 --------------------------------------------------------------------------------------------------------------


def test_r25_every_field_set_to_another_value_arrives(tmp_path: Path) -> None:
    assert {s: list(f) for s, f in OTHER.items()} == {s: list(f) for s, f in DEFAULT.items()}
    assert not [(s, k) for s, k in FIELDS if OTHER[s][k] == DEFAULT[s][k]]
    profile = load_profile(write(tmp_path / "other.toml", OTHER))
    assert profile.model_dump() == OTHER
    types = {(s, k): type(getattr(getattr(profile, s), k)) for s, k in FIELDS}
    assert types == {(s, k): type(OTHER[s][k]) for s, k in FIELDS}


def test_the_profile_has_the_fields_of_the_file_and_no_defaults() -> None:
    assert load_profile(SMOKETEST).model_dump() == DEFAULT
    for section in Profile.model_fields.values():
        assert section.is_required()
        assert all(field.is_required() for field in section.annotation.model_fields.values())


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_a_missing_key_is_named(tmp_path: Path, section: str, key: str) -> None:
    values = DEFAULT | {section: {k: v for k, v in DEFAULT[section].items() if k != key}}
    with pytest.raises(ValueError, match=rf"p\.toml: {section}\.{key} is missing") as caught:
        load_profile(write(tmp_path / "p.toml", values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_a_wrong_type_is_named(tmp_path: Path, section: str, key: str) -> None:
    number_or_word = key == "commission_usd_per_side"
    wrong = 1.5 if isinstance(DEFAULT[section][key], bool | str | list) and not number_or_word else "1"
    with pytest.raises(ValueError, match=rf"p\.toml: {section}\.{key} is {wrong!r}, ") as caught:
        load_profile(write(tmp_path / "p.toml", changed(section, key, wrong)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("game", "max_contracts", 4.0), ("game", "max_contracts", True), ("game", "margin", 1),
        ("network", "hidden", [64, "x"]), ("network", "hidden", []), ("loss", "gamma", 1.0), ("train", "tau", 0.0),
        ("train", "batch_size", 0), ("data", "synthetic", "planned"), ("gate", "standard_errors", -1.0),
        ("collect", "counterfactual_share", 1.5), ("train", "seed", -1), ("train", "ofi_start_epoch", -1),
        ("data", "stamp", "middle"), ("data", "roll", "never"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(tmp_path: Path, section: str, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{section}\.{key}") as caught:
        load_profile(write(tmp_path / "p.toml", changed(section, key, value)))
    assert "\n" not in str(caught.value)


def test_unknown_keys_and_sections_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.learning_rat is unknown"):
        load_profile(write(tmp_path / "p.toml", changed("train", "learning_rat", 0.1)))
    with pytest.raises(ValueError, match="trian is unknown"):
        load_profile(write(tmp_path / "p.toml", DEFAULT | {"trian": {}}))
    with pytest.raises(ValueError, match="gate is missing"):
        load_profile(write(tmp_path / "p.toml", {s: f for s, f in DEFAULT.items() if s != "gate"}))


def test_a_whole_number_is_taken_for_a_float(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path / "p.toml", changed("game", "spread_ticks", 2)))
    assert type(profile.game.spread_ticks) is float


def test_what_is_no_profile_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml does not exist"):
        load_profile(tmp_path / "nowhere.toml")
    (tmp_path / "p.toml").write_text("[data\n")
    with pytest.raises(ValueError, match=r"p\.toml is not TOML"):
        load_profile(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text("data = 3\n")
    with pytest.raises(ValueError, match="data"):
        load_profile(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"p\.toml"):
        load_profile(tmp_path / "p.toml")


# --- What does not fit together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"train.batch_size": 64, "replay.capacity": 32, "replay.min_size": 32},
            "train.batch_size is 64, expected at most replay.capacity, 32",
        ),
        ({"train.batch_size": 64, "replay.min_size": 63}, "replay.min_size is 63, expected train.batch_size, 64, to"),
        ({"replay.capacity": 4_000}, "replay.min_size is 5000"),
        # 65 accounts with three open windows each may all end in the same step.
        (
            {
                "replay.capacity": 194,
                "replay.min_size": 64,
                "train.batch_size": 64,
                "collect.num_envs": 65,
                "loss.n_step": 3,
            },
            "replay.capacity is 194, expected at least collect.num_envs × loss.n_step, 195",
        ),
        ({"data.mbp10_data_dir": "/x"}, "mbp10_data_dir is '/x' with a synthetic market, expected it beside path"),
        ({"data.trades_data_dir": "/x"}, "trades_data_dir is '/x' with a synthetic market"),
        ({"data.definitions_data_dir": "/x"}, "definitions_data_dir is '/x' with a synthetic market"),
        ({"network.num_quantiles": 0}, "expected network.num_quantiles above 0"),
        ({"data.path": "x"}, "exactly one of path and synthetic"),
        ({"data.synthetic": ""}, "exactly one of path and synthetic"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(SMOKETEST, overrides)
    assert "\n" not in str(caught.value)


def test_a_replay_that_holds_what_one_step_can_finish_is_taken() -> None:
    small = {"replay.capacity": 195, "replay.min_size": 64, "train.batch_size": 64, "collect.num_envs": 65}
    assert load_profile(SMOKETEST, small | {"loss.n_step": 3}).replay.capacity == 195


def test_settings_of_the_game_are_those_of_the_environments() -> None:
    settings = parse_profile(OTHER).game.settings()
    assert settings["shaping"] == {"entropy": 0.1, "hindsight": 0.2, "micro": -0.3, "drawdown": 0.4}
    assert settings["depth_contracts"] == 5
    assert not any(name.startswith("shaping_") for name in settings)
    plain = load_profile(SMOKETEST).game.settings()
    assert plain["shaping"] == {}
    # What the profile leaves to the market and its contract is not there to override them.
    assert not {"depth_contracts", "commission_usd_per_side"} & set(plain)
    noisy = fox_env.synthetic_market("planted_noisy", 1_000)
    assert game_of(noisy, plain).depth_contracts == 2


# --- R26: paths -------------------------------------------------------------------------------------------------------


PATHS = ("path", "mbp10_data_dir", "trades_data_dir", "definitions_data_dir", "cache_dir")


@pytest.mark.parametrize("marker", ["pyproject.toml", ".git"])
def test_r26_a_relative_path_is_the_projects_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / marker).touch()
    given = {key: f"data/{key}/*.csv" for key in PATHS}
    values = DEFAULT | {"data": DEFAULT["data"] | given | {"synthetic": ""}}
    write(project / "configs" / "p.toml", values)
    found = []
    for place, file in (
        (project, "configs/p.toml"),
        (tmp_path, "project/configs/p.toml"),
        (project / "configs", "p.toml"),
    ):
        monkeypatch.chdir(place)
        found.append(load_profile(file).data)
    for data in found:
        assert {key: getattr(data, key) for key in PATHS} == {k: str(project / v) for k, v in given.items()}


def test_paths_outside_a_project_are_beside_the_file_and_absolute_ones_stay(tmp_path: Path) -> None:
    # pytest's folder lies in no project.
    own = load_profile(write(tmp_path / "p.toml", DEFAULT), {"data.path": "x.csv", "data.synthetic": ""})
    assert own.data.path == str(tmp_path / "x.csv")
    assert (own.data.mbp10_data_dir, own.data.cache_dir) == ("", "")  # not given is not a folder
    absolute = load_profile(tmp_path / "p.toml", {"data.path": "/elsewhere/x.csv", "data.synthetic": ""})
    assert absolute.data.path == "/elsewhere/x.csv"


# --- Overrides and saving ---------------------------------------------------------------------------------------------


def test_overrides_as_strings_and_as_a_mapping() -> None:
    strings = (
        "train.seed=3", "train.learning_rate = 1e-4", "network.hidden=[8, 8]", "game.margin=false", "data.symbol=NQ",
        'data.tz="America/Chicago"', "train.weight_decay=2", "data.synthetic=garch",
    )  # fmt: skip
    profile = load_profile(SMOKETEST, strings)
    assert profile == load_profile(SMOKETEST, dict(map(parse_override, strings)))
    assert (profile.train.seed, profile.train.learning_rate, profile.network.hidden) == (3, 1e-4, [8, 8])
    assert (profile.game.margin, profile.data.symbol, profile.data.tz) == (False, "NQ", "America/Chicago")
    assert (profile.train.weight_decay, profile.data.synthetic) == (2.0, "garch")
    assert type(profile.train.weight_decay) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.seed", "--set 'train.seed' is not section.key=value"),
        ("seed=3", "seed is not a key of profile"),
        ("train.sed=3", r"train\.sed is not a key of profile"),
        ("trian.seed=3", r"trian\.seed is not a key of profile"),
        ("train.seed=x", r"train\.seed is 'x'"),
        ("train.seed=", r"train\.seed is ''"),
        ("train.seed=1.5", r"train\.seed is 1\.5"),
        ("game.margin=1", r"game\.margin is 1"),
        ("train.learning_rate=true", r"train\.learning_rate is True"),
    ],
)
def test_a_bad_override_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(SMOKETEST, [text])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [DEFAULT, OTHER], ids=["smoketest", "other"])
def test_a_dumped_profile_reads_back_the_same(tmp_path: Path, values: dict) -> None:
    profile = parse_profile(values)
    (tmp_path / "p.toml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "p.toml") == profile
    assert dump_profile(load_profile(tmp_path / "p.toml")) == dump_profile(profile)


@pytest.mark.parametrize("path", ['/a "quoted" one', "/back\\slash", "/line\nbreak\ttab", "/ünïcode €"])
def test_a_dumped_profile_keeps_odd_strings(tmp_path: Path, path: str) -> None:
    profile = parse_profile(DEFAULT | {"data": OTHER["data"] | {"path": path}})
    (tmp_path / "p.toml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "p.toml").data.path == path


def test_every_profile_of_the_project_loads() -> None:
    for file in SMOKETEST.parent.glob("*.toml"):
        if "hyperopt" not in file.name:
            assert load_profile(file).model_dump().keys() == DEFAULT.keys()


def test_a_date_on_the_command_line_is_a_date_of_the_profile() -> None:
    assert parse_override("data.train_end=2020-01-31") == ("data.train_end", "2020-01-31")
    with pytest.raises(ValueError, match=r"train\.seed"):
        load_profile(SMOKETEST, ["train.seed=99999999999999999999"])
