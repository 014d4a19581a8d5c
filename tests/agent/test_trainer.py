"""The trainer: runs that repeat and resume bit for bit, its schedules, what it keeps, and its gate."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fox_env
from fox_agent import Agent, Trainer
from fox_agent.losses import total_loss
from fox_agent.network import BranchingNetwork
from fox_agent.normalization import RewardScale
from fox_agent.profile import Profile, load_profile
from fox_agent.trainer import METRICS_FILE, NO_EDGE, PROFILE_FILE, STATE_FILE
from fox_env import dynamics
from fox_env.actions import BASELINES
from fox_env.data.synthetic import synthetic_bars
from tests.agent.tiny import parts, tiny_profile


def make(profile: Profile | None = None, out: Path | None = None, kind: str = "planted") -> Trainer:
    train, valid, _ = parts(kind)
    return Trainer(profile or tiny_profile(), train, valid, out=out)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in flat(inner, f"{prefix}/{key}").items()}
    return {prefix: value}


def everything(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """What the next update would depend on."""
    trainer.save_checkpoint(folder / "probe.pt")
    return flat(torch.load(folder / "probe.pt", weights_only=True))


def assert_identical(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name] or (value != value and theirs[name] != theirs[name]), name


class Killed(Exception):
    pass


def killed_at(update: int):
    def on_update(trainer: Trainer) -> None:
        if trainer.update_count == update:
            raise Killed

    return on_update


# --- A run ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files_and_finite_metrics(tmp_path: Path) -> None:
    profile = tiny_profile()
    updates, epochs = [], []
    result = make(profile, tmp_path).fit(on_update=lambda t: updates.append(t.update_count), on_epoch=epochs.append)
    assert updates == list(range(1, 13))
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines == epochs
    assert [line["epoch"] for line in lines] == [0, 1]
    assert [line["updates"] for line in lines] == [6, 12]
    for line in lines:
        figures = {name: value for name, value in line.items() if isinstance(value, float)}
        assert {"loss", "ce", "quantile", "q_gap", "q_var", "grad_norm", "end_atom_mass", "valid_t"} <= figures.keys()
        assert all(math.isfinite(value) for value in figures.values())
    assert result.epochs == 2
    assert (result.best_epoch, result.gate_t) == max(
        (line["valid_net_pnl_usd"], -line["epoch"], (line["epoch"], line["valid_t"])) for line in lines
    )[2]
    assert load_profile(tmp_path / PROFILE_FILE) == profile
    assert list((tmp_path / "tensorboard").iterdir())
    obs = (
        np.random.default_rng(0).standard_normal((5, 50)).astype(np.float32)[:, : result.agent.network.num_features + 6]
    )
    assert torch.equal(Agent.load(tmp_path / "best").q_values(obs), result.agent.q_values(obs))
    assert not [file for file in tmp_path.rglob(".*") if file.is_file()]  # nothing half-written


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tiny_profile(train__epochs=1)).fit()
    assert not list(tmp_path.iterdir())


def test_statistics_of_q_are_in_every_epoch_however_short() -> None:
    epochs: list[dict] = []
    make(tiny_profile(train__updates_per_epoch=1, train__epochs=3)).fit(on_epoch=epochs.append)
    assert all(math.isfinite(line["q_gap"]) for line in epochs)


def test_a_part_without_a_second_session_gives_no_t_but_a_sane_verdict() -> None:
    train, valid, _ = parts()
    short = valid.slice(0, int(np.flatnonzero(np.diff(valid.session))[0]))
    epochs: list[dict] = []
    result = Trainer(tiny_profile(train__epochs=1), train, short).fit(on_epoch=epochs.append)
    assert math.isnan(epochs[0]["valid_t"])
    assert "exploding" not in epochs[0]["verdict"]
    assert not result.agent.deployed


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    trainer = make()

    def poison(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.network.output.bias[0] = math.nan

    with pytest.raises(FloatingPointError, match="epoch 0 is nan"):
        trainer.fit(on_update=poison)


def test_parts_with_different_features_are_refused() -> None:
    train = parts()[0]
    other = fox_env.synthetic_market(
        "planted", 6_000, drop=("rsi_14",) if "rsi_14" in train.feature_names else train.feature_names[:1]
    )
    with pytest.raises(ValueError, match="different features"):
        Trainer(tiny_profile(), train, other)


# --- Resuming ---------------------------------------------------------------------------------------------------------

# Noisy heads, fewer bars than updates and an n-step return have state of their own.
AWKWARD = {
    "network__noisy": True, "collect__steps_per_update": 0.7, "loss__n_step": 2, "train__epochs": 3,
    "loss__c51_warmup_epochs": 2, "train__tau_anneal_updates": 10, "train__tau_start": 0.1, "replay__capacity": 150,
    "train__ofi_start_epoch": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "how", ["at an epoch's end", "in an epoch, killed", "in an epoch, stopped", "stopped at its end"]
)
@pytest.mark.parametrize("settings", [{}, AWKWARD], ids=["tiny", "awkward"])
def test_killing_and_resuming_equals_not_killing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, settings: dict
) -> None:
    if settings is AWKWARD:
        monkeypatch.setattr("fox_agent.trainer.ORDER_FLOW", HIDDEN)  # shown from update 6 on
    profile = tiny_profile(**settings)
    whole = make(profile, tmp_path / "whole")
    expected = whole.fit()

    def kill(trainer_or_metrics: Any) -> None:
        raise Killed

    def stop(update: int):
        return lambda trainer: trainer.stop() if trainer.update_count == update else None

    out = tmp_path / "killed"
    arguments, error = {
        "at an epoch's end": ({"on_epoch": kill}, Killed),
        "in an epoch, killed": ({"on_update": killed_at(9)}, Killed),
        "in an epoch, stopped": ({"on_update": stop(9)}, KeyboardInterrupt),
        "stopped at its end": ({"on_update": stop(6)}, KeyboardInterrupt),
    }[how]
    with pytest.raises(error):
        make(profile, out).fit(**arguments)
    again = make(profile, out)
    updates: list[int] = []
    result = again.fit(resume=True, on_update=lambda t: updates.append(t.update_count))
    assert updates[0] == (10 if how == "in an epoch, stopped" else 7)
    assert_identical(everything(again, tmp_path), everything(whole, tmp_path))
    assert (out / METRICS_FILE).read_text() == (tmp_path / "whole" / METRICS_FILE).read_text()
    assert (result.verdict, result.best_epoch, result.epochs) == (
        expected.verdict,
        expected.best_epoch,
        expected.epochs,
    )
    assert (out / "best" / "agent.safetensors").read_bytes() == (tmp_path / "whole/best/agent.safetensors").read_bytes()


def test_metrics_that_no_checkpoint_counts_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(out=tmp_path / "whole")
    whole.fit()
    save = Trainer.save_checkpoint

    def kill_at_the_second(trainer: Trainer, path: Path) -> None:
        if trainer.epoch == 2:
            raise Killed
        save(trainer, path)

    out = tmp_path / "killed"
    monkeypatch.setattr(Trainer, "save_checkpoint", kill_at_the_second)
    with pytest.raises(Killed):
        make(out=out).fit()
    monkeypatch.setattr(Trainer, "save_checkpoint", save)
    expected = (tmp_path / "whole" / METRICS_FILE).read_text()
    assert (out / METRICS_FILE).read_text() == expected
    make(out=out).fit(resume=True)
    assert (out / METRICS_FILE).read_text() == expected


def test_a_stopped_trainer_goes_on_itself(tmp_path: Path) -> None:
    whole, stopped = make(), make(out=tmp_path)
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(on_update=lambda t: t.stop() if t.update_count == 4 else None)
    stopped.fit(resume=True)
    assert torch.equal(stopped.network.output.weight, whole.network.output.weight)


def test_a_finished_run_resumes_to_its_result(tmp_path: Path) -> None:
    first = make(out=tmp_path).fit()
    lines = (tmp_path / METRICS_FILE).read_text()
    second = make(out=tmp_path).fit(resume=True, on_update=lambda t: pytest.fail("nothing is left to do"))
    assert second.verdict == first.verdict
    assert (tmp_path / METRICS_FILE).read_text() == lines


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    profile = tiny_profile(train__epochs=1)
    make(profile, tmp_path).fit()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match="holds a run already"):
        make(profile, tmp_path).fit()
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    # Metrics are written before the checkpoint that counts them.
    (tmp_path / METRICS_FILE).write_text('{"epoch": 0}\n')
    make(tiny_profile(train__epochs=1), tmp_path).fit()
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1


def test_another_profile_does_not_resume(tmp_path: Path) -> None:
    make(tiny_profile(train__epochs=1), tmp_path).fit()
    saved = (tmp_path / PROFILE_FILE).read_text()
    with pytest.raises(ValueError, match="another profile"):
        make(tiny_profile(train__epochs=1, train__learning_rate=1e-4), tmp_path).fit(resume=True)
    assert (tmp_path / PROFILE_FILE).read_text() == saved


def test_nothing_to_resume_and_a_broken_checkpoint_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        make(out=tmp_path).fit(resume=True)
    for content in (b"", b"garbage", b"PK\x03\x04 half a file"):
        (tmp_path / STATE_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=f"{STATE_FILE} is not a checkpoint") as caught:
            make(out=tmp_path).fit(resume=True)
        assert "\n" not in str(caught.value)
    torch.save({"schema": 99}, tmp_path / STATE_FILE)
    with pytest.raises(ValueError, match="schema 99, expected 1"):
        make(out=tmp_path).fit(resume=True)


# --- Trainers share nothing (R9, R10) ---------------------------------------------------------------------------------


def test_r9_r10_a_second_trainer_shares_nothing_with_the_first(tmp_path: Path) -> None:
    profile = tiny_profile(train__tau_restart_ratio=1.1, loss__reward_normalization="reward")
    first = make(profile)
    fresh = everything(first, tmp_path)
    first.scale.update(torch.full((1000,), 1e3))  # a fold of rewards a thousand times as large
    first.best["net"] = 5e9
    first.fit()
    second = make(profile)
    assert_identical(everything(second, tmp_path), fresh)
    make(tiny_profile(train__seed=5), kind="garch").fit()
    epochs: list[dict] = []
    second.fit(on_epoch=epochs.append)
    third = make(profile)
    third.fit()
    assert_identical(everything(second, tmp_path), everything(third, tmp_path))
    assert second.best["net"] == max(line["valid_net_pnl_usd"] for line in epochs)
    assert first.best["net"] == 5e9


def test_the_seed_matters_and_the_global_generator_does_not(tmp_path: Path) -> None:
    weights = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        trainer = make(tiny_profile(train__seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
        for _ in range(2):
            torch.rand(noise)
        trainer.fit()
        weights.append(trainer.network.output.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_number_of_threads_is_the_profiles_to_the_end() -> None:
    # In a fresh process, where the game starts numba's threads, which share OpenMP's number with torch's.
    code = (
        "import torch; from fox_agent import Trainer; from tests.agent.tiny import parts, tiny_profile;"
        "trainer = Trainer(tiny_profile(), *parts()[:2]); trainer._player.play('flat'); print(torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env={**os.environ, "NUMBA_NUM_THREADS": "2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "1"


def test_one_step_finishes_as_many_transitions_as_the_smallest_replay_holds() -> None:
    # 40 accounts whose episodes end together, with two open windows each.
    trainer = make(
        tiny_profile(
            collect__num_envs=40, loss__n_step=2, replay__capacity=80, game__min_hold_bars=1, train__epochs=1,
            train__updates_per_epoch=61,
        )
    )  # fmt: skip
    finished: list[int] = []
    extend = trainer.replay.extend
    trainer.replay.extend = lambda batch: finished.append(len(batch["bar"])) or extend(batch)
    trainer.fit()
    assert max(finished) == 80


# --- The gate, the best epoch and early stopping ----------------------------------------------------------------------


def test_without_an_edge_the_result_is_flat(tmp_path: Path) -> None:
    result = make(tiny_profile(gate__standard_errors=1e6), tmp_path).fit()
    assert result.verdict.startswith(f"{NO_EDGE}: validation net profit is ")
    assert result.verdict.endswith("the gate asks for 1e+06")
    for agent in (result.agent, Agent.load(tmp_path / "best")):
        assert not agent.deployed
        obs = np.ones((3, agent.network.num_features + 6), np.float32)
        assert agent(obs).tolist() == [list(BASELINES["flat"])] * 3
    report = fox_env.evaluate(result.agent, parts()[2], baselines=False, **tiny_profile().game.settings())
    assert report.policies["agent"]["net_pnl_points"] == 0
    assert report.policies["agent"]["trades"] == 0


@pytest.mark.parametrize(("gate_t", "deployed"), [(3.01, True), (3.0, False), (-9.0, False), (math.nan, False)])
def test_the_gate_asks_for_more_than_its_standard_errors(gate_t: float, deployed: bool) -> None:
    trainer = make()
    trainer.best["gate_t"] = gate_t
    result = trainer.result()
    assert result.agent.deployed is deployed
    assert result.verdict.startswith("deployed" if deployed else NO_EDGE)


@pytest.mark.parametrize("gate_t", [math.inf, 5.0])
def test_the_gate_needs_sessions_and_a_finite_figure(gate_t: float) -> None:
    sessions = len(np.unique(parts()[1].session))
    trainer = make(tiny_profile(gate__min_sessions=sessions + 1))
    trainer.best["gate_t"] = gate_t
    result = trainer.result()
    assert not result.agent.deployed
    assert result.verdict == f"{NO_EDGE}: validation has {sessions} sessions, the gate asks for {sessions + 1}"
    trainer = make(tiny_profile(gate__min_sessions=sessions))
    trainer.best["gate_t"] = gate_t
    assert trainer.result().agent.deployed is math.isfinite(gate_t)


def test_an_agent_on_disk_has_passed_the_gate_or_is_flat(tmp_path: Path) -> None:
    trainer = make(tiny_profile(gate__standard_errors=1e6, train__epochs=1), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(on_epoch=lambda metrics: (_ for _ in ()).throw(KeyboardInterrupt))
    assert not Agent.load(tmp_path / "run" / "best").deployed


def test_a_run_is_not_resumed_on_another_market(tmp_path: Path) -> None:
    make(out=tmp_path / "run").fit()
    other = Trainer(tiny_profile(), *parts("planted", 6_000, 1)[:2], out=tmp_path / "run")
    with pytest.raises(ValueError, match="was made with another market"):
        other.fit(resume=True)


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    trainer = make(out=tmp_path / "run")
    trainer._valid_sessions = 1
    trainer._record({"epoch": 0, "valid_t": math.nan, "loss": 1.0}, trainer._board())
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"epoch": 0, "valid_t": None, "loss": 1.0}
    ]


def test_the_agent_is_the_averaged_network_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tiny_profile(train__epochs=4, network__noisy=True, train__tau=0.2))
    targets: list[dict] = []
    nets = iter((1.0, 3.0, 2.0, 3.0))
    play = trainer._player.play
    played: list[Agent] = []

    class Fixed:
        def __init__(self, record: Any) -> None:
            self.record = record

        def __getattr__(self, name: str) -> Any:
            return getattr(self.record, name)

    def remember(agent: Agent) -> Any:
        played.append(agent)
        return play(agent)

    import fox_agent.trainer as module

    figures = module.policy_figures
    monkeypatch.setattr(trainer._player, "play", remember)
    monkeypatch.setattr(module, "policy_figures", lambda record, **_: {**figures(record), "net_pnl_usd": next(nets)})
    result = trainer.fit(on_epoch=lambda _: targets.append(copy.deepcopy(trainer.target.state_dict())))
    assert result.best_epoch == 1  # of equals the first
    for name, value in result.agent.network.state_dict().items():
        assert torch.equal(value, targets[1][name])
        assert torch.equal(value, played[1].network.state_dict()[name])
    assert not torch.equal(targets[1]["output.weight"], targets[3]["output.weight"])
    assert not torch.equal(trainer.network.output.weight, trainer.target.output.weight)
    assert not result.agent.network.output.noise_in.any()
    assert trainer.network.output.noise_in.any()


@pytest.mark.parametrize(("nets", "patience", "epochs"), [
    ((5.0, 4.0, 3.0, 9.0, 9.0, 9.0), 2, 3),
    ((1.0, 2.0, 1.0, 3.0, 1.0, 1.0), 2, 6),
    ((5.0, 4.0, 3.0, 2.0, 1.0, 0.0), 0, 6),
])  # fmt: skip
def test_early_stopping(monkeypatch: pytest.MonkeyPatch, nets: tuple, patience: int, epochs: int) -> None:
    import fox_agent.trainer as module

    trainer = make(tiny_profile(train__epochs=6, train__updates_per_epoch=1, train__early_stopping_epochs=patience))
    figures, given = module.policy_figures, iter(nets)
    monkeypatch.setattr(module, "policy_figures", lambda record, **_: {**figures(record), "net_pnl_usd": next(given)})
    assert trainer.fit().epochs == epochs


def test_the_bootstrap_is_left_to_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    bootstrap = fox_env.metrics.stationary_bootstrap
    monkeypatch.setattr(
        fox_env.metrics, "stationary_bootstrap", lambda m, r, *rest: drawn.append(r) or bootstrap(m, r, *rest)
    )
    result = make(tiny_profile(train__epochs=1)).fit()
    assert not any(drawn)
    report = fox_env.evaluate(result.agent, parts()[2], others={"candidate": "long"}, **tiny_profile().game.settings())
    assert 1_000 in drawn
    assert None not in report.policies["long"]["sharpe_interval"]


# --- The gate of the order flow ---------------------------------------------------------------------------------------

HIDDEN = ("return_1", "rsi_14")  # they stand for order flow, which synthetic markets do not have


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two of the market's features are gated: their columns."""
    monkeypatch.setattr("fox_agent.trainer.ORDER_FLOW", HIDDEN)
    return [parts()[0].feature_names.index(name) for name in HIDDEN]


def sees(network: torch.nn.Module, columns: list[int]) -> list[bool]:
    """Does the network's output depend on these market features?"""
    market = torch.randn(8, network.num_features, generator=torch.Generator().manual_seed(0))
    position = torch.zeros(8, dynamics.POSITION_FIELDS)
    before = network(market, position).adv_BKMN
    found = []
    for column in columns:
        other = market.clone()
        other[:, column] += 3.0
        found.append(not torch.equal(network(other, position).adv_BKMN, before))
    return found


def test_order_flow_is_hidden_from_everything_until_its_epoch(gated: list[int], tmp_path: Path) -> None:
    profile = tiny_profile(train__ofi_start_epoch=1, train__epochs=2, game__window=2)
    trainer = make(profile, tmp_path)
    width = len(parts()[0].feature_names)
    columns = [*gated, *(width + column for column in gated)]  # in both bars of the window
    others = [column for column in range(2 * width) if column not in columns]
    acted: list[tuple[int, bool]] = []
    act = trainer._act

    def look(obs: torch.Tensor) -> Any:
        acted.append((trainer.epoch, any(sees(trainer.network, columns))))
        return act(obs)

    trainer._act = look
    judged: list[list[bool]] = []
    play = trainer._player.play
    trainer._player.play = lambda agent: judged.append(sees(agent.network, columns)) or play(agent)
    learned: list[tuple[int, list[bool]]] = []

    def at_update(trainer: Trainer) -> None:
        for network in (trainer.network, trainer.target):
            learned.append((trainer.epoch, sees(network, columns)))
            assert all(sees(network, others[:5]))

    lines: list[dict] = []
    trainer.fit(on_update=at_update, on_epoch=lines.append)
    assert {found for epoch, found in acted if epoch == 0} == {False}
    assert {found for epoch, found in acted if epoch == 1} == {True}
    assert learned == [(0, [False] * 4)] * 12 + [(1, [True] * 4)] * 12
    assert judged == [[False] * 4, [True] * 4]
    assert [line["order_flow_shown"] for line in lines] == [False, True]
    assert [json.loads(line)["order_flow_shown"] for line in (tmp_path / METRICS_FILE).open()] == [False, True]


def test_features_of_the_book_and_of_the_sides_of_trades_are_gated() -> None:
    bars = synthetic_bars("garch", 3_000, 0).bars
    columns = {name: getattr(bars, name) for name in ("open", "high", "low", "close", "volume")}
    columns |= {
        "bid": bars.close - 0.25,
        "ask": bars.close,
        "bid_size": 1 + bars.volume % 7,
        "ask_size": bars.close % 5,
    }
    columns |= {"ask_volume": bars.volume // 3, "bid_volume": bars.volume - bars.volume // 3}
    market = fox_env.Market.from_bars(pd.DataFrame(columns, pd.to_datetime(bars.start, utc=True)), interval="5m")
    trainer = Trainer(tiny_profile(train__ofi_start_epoch=1), *market.split(0.6, 0.2)[:2])
    names = [market.feature_names[column] for column in trainer.network.gated]
    assert names == ["trade_imbalance", "microprice_offset", "spread"]


def test_an_agent_of_before_the_gate_stays_blind(
    gated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fox_agent.trainer as module

    figures, nets = module.policy_figures, iter((5.0, 1.0, 1.0))
    monkeypatch.setattr(module, "policy_figures", lambda record, **_: {**figures(record), "net_pnl_usd": next(nets)})
    trainer = make(tiny_profile(train__ofi_start_epoch=1, train__epochs=3), tmp_path)
    result = trainer.fit()
    assert result.best_epoch == 0
    assert all(sees(trainer.target, gated))
    for agent in (result.agent, Agent.load(tmp_path / "best")):
        assert not any(sees(agent.network, gated))
        assert agent.network.shown_F.sum() == len(parts()[0].feature_names) - 2


def test_a_market_without_order_flow_trains_as_if_there_were_no_gate(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [make(tiny_profile(train__ofi_start_epoch=epoch)) for epoch in (0, 1, 9)]
    found = []
    for trainer in runs:
        lines: list[dict] = []
        trainer.fit(on_epoch=lines.append)
        assert "order_flow_shown" not in lines[0]
        found.append(everything(trainer, tmp_path))
        assert not [name for name in found[-1] if "shown_F" in name]
        del found[-1]["/profile"]
    assert_identical(found[0], found[1])
    assert_identical(found[0], found[2])


def test_r31_a_gate_that_opens_at_epoch_0_changes_nothing(
    gated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Masked features are contiguous, and matrix products of another layout round in another way.
    split = BranchingNetwork.split_observation
    monkeypatch.setattr(
        BranchingNetwork, "split_observation", lambda net, obs: tuple(part.contiguous() for part in split(net, obs))
    )
    lines: list[dict] = []
    profile = tiny_profile(train__ofi_start_epoch=0)
    shown = make(profile)
    shown.fit(on_epoch=lines.append)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert [line["order_flow_shown"] for line in lines] == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fox_agent.trainer.ORDER_FLOW", ())
        plain = make(profile)
    plain.fit()
    mine = {name: value for name, value in everything(shown, tmp_path).items() if "shown_F" not in name}
    assert_identical(mine, everything(plain, tmp_path))
    hidden = make(tiny_profile(train__ofi_start_epoch=1))
    hidden.fit()
    assert not torch.equal(hidden.network.output.weight, plain.network.output.weight)


def test_a_run_too_short_to_see_its_order_flow_is_warned_of(gated: list[int]) -> None:
    with pytest.warns(
        UserWarning, match=r"ofi_start_epoch is 2 and train.epochs 2: .* never see .* order flow"
    ) as caught:
        make(tiny_profile(train__ofi_start_epoch=2, train__epochs=2))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tiny_profile(train__ofi_start_epoch=1, train__epochs=2))


def test_epochs_without_order_flow_do_not_try_the_patience(gated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    import fox_agent.trainer as module

    settings = {"train__epochs": 8, "train__updates_per_epoch": 1, "train__early_stopping_epochs": 2}
    trainer = make(tiny_profile(train__ofi_start_epoch=4, **settings))
    figures, nets = module.policy_figures, iter((9.0, *[1.0] * 7))
    monkeypatch.setattr(module, "policy_figures", lambda record, **_: {**figures(record), "net_pnl_usd": next(nets)})
    assert trainer.fit().epochs == 6  # two with order flow, 4 and 5, and neither of them better


# --- Schedules and scales ---------------------------------------------------------------------------------------------


def alphas(**settings: Any) -> list[float]:
    found: list[float] = []
    make(tiny_profile(loss__c51_alpha_max=0.8, **settings)).fit(
        on_update=lambda t: found.append(float(t._coefficients.coef_4[0]))
    )
    return found


def test_the_cross_entropy_is_warmed_up_over_its_epochs() -> None:
    found = alphas(loss__c51_warmup_epochs=2, train__updates_per_epoch=5, train__epochs=3)
    assert found == pytest.approx([0.08 * u for u in range(10)] + [0.8] * 5)


def test_r31_without_warmup_alpha_is_its_maximum_at_once() -> None:
    assert alphas(loss__c51_warmup_epochs=0) == pytest.approx([0.8] * 12)


def test_exploration_is_that_of_the_update_to_come_from_the_first_bar_on() -> None:
    trainer = make(
        tiny_profile(exploration__epsilon_start=1.0, exploration__epsilon_end=0.4, exploration__epsilon_steps=3)
    )
    found: list[tuple[int, float]] = []
    step = trainer.collector.step

    def look(actor: Any) -> Any:
        found.append((trainer.update_count, round(float(trainer._epsilon), 6)))
        return step(actor)

    trainer.collector.step = look
    trainer.fit()
    assert found.count((0, 1.0)) > 3  # until there is enough to learn from
    assert found[-11:] == [(1, 0.8), (2, 0.6), *((update, 0.4) for update in range(3, 12))]


def test_the_other_coefficients_epsilon_and_beta() -> None:
    profile = tiny_profile(
        loss__cql_alpha=0.3, loss__entropy_coefficient=0.002, loss__smoothing_strength=0.05,
        exploration__epsilon_start=1.0, exploration__epsilon_end=0.2, exploration__epsilon_steps=4,
        replay__beta_start=0.4, replay__beta_end=1.0,
    )  # fmt: skip
    epsilon, beta = [], []

    def look(trainer: Trainer) -> None:
        epsilon.append(float(trainer._epsilon))
        beta.append(float(trainer.replay.priorities._beta))

    trainer = make(profile)
    trainer.fit(on_update=look)
    assert trainer._coefficients.coef_4.tolist() == pytest.approx([1.0, 0.3, 0.002, 0.05])
    assert epsilon == pytest.approx([1.0, 0.8, 0.6, 0.4, *[0.2] * 8])
    assert beta == pytest.approx([0.4 + 0.6 * u / 12 for u in range(12)])


def test_a_jump_of_the_reward_scale_restarts_the_targets_rate() -> None:
    trainer = make(tiny_profile(train__tau_start=0.5, train__tau=0.1, train__tau_anneal_updates=4, train__epochs=3))
    rates: list[float] = []

    def look(trainer: Trainer) -> None:
        rates.append(trainer._tau())
        if trainer.update_count == 9:
            trainer.scale.update(torch.ones(10_000))

    trainer.fit(on_update=look)
    ramp = [0.5, 0.4, 0.3, 0.2, 0.1]
    assert rates == pytest.approx([*ramp[1:], *[0.1] * 8, *ramp[1:], 0.1, 0.1])


@pytest.mark.parametrize(
    ("kind", "gamma", "bound"), [("auto", 0.9, 4 / 0.19**0.5), ("auto", 0.0, 4.0), ("unit", 0.9, 1.0)]
)
def test_the_support_starts_where_the_profile_says(kind: str, gamma: float, bound: float) -> None:
    trainer = make(tiny_profile(loss__support=kind, loss__gamma=gamma))
    assert trainer.support.bounds.tolist() == pytest.approx([-bound, bound])


def test_the_support_grows_during_a_run_and_its_agent_takes_it_along() -> None:
    trainer = make(
        tiny_profile(loss__support="unit", train__tau=0.5, train__tau_start=0.5, train__updates_per_epoch=60)
    )
    result = trainer.fit()
    assert trainer.support.bounds[1] == pytest.approx(1.1**2)
    assert result.agent.support[1] == pytest.approx(1.1 ** (1 + result.best_epoch))


def test_rewards_are_scaled_by_the_market_or_by_themselves() -> None:
    train = parts()[0]
    by_market, by_reward = make(), make(tiny_profile(loss__reward_normalization="reward"))
    returns: list[torch.Tensor] = []
    step = by_market.collector.step

    def keep(actor: Any) -> Any:
        found = step(actor)
        returns.append(found[1])
        return found

    by_market.collector.step = keep
    for trainer in (by_market, by_reward):
        trainer.fit()
    assert float(by_market.scale.scale()) == pytest.approx(float(torch.cat(returns).square().mean().sqrt()), rel=1e-6)
    # About the root mean square of one bar's move, 1 point of ~4000 a bar.
    assert 0.5 < float(by_market.scale.scale()) * float(train.bars.close.mean()) < 2
    stored = RewardScale("reward")
    stored.update(by_reward.replay.state_dict()["fields.reward"][: len(by_reward.replay)])
    assert float(by_reward.scale.scale()) == pytest.approx(float(stored.scale()), rel=1e-3)


def test_the_target_of_a_mirrored_transition_is_judged_in_the_agents_frame() -> None:
    trainer = make(tiny_profile(game__mirror_prob=1.0, train__epochs=1))
    trainer.fit()
    batch, _, weight = trainer.replay.sample()
    loss_batch = trainer._loss_batch(batch, weight)
    held = (-batch["next_position_state"][:, 0] * 4).round().int()
    assert held.any()
    for row, position in enumerate(held.tolist()):
        assert loss_batch.next_send_BE[row].tolist() == [t != position for t in (-1, -2, -4, 0, 0, 0, 1, 2, 4)]
    torch.testing.assert_close(loss_batch.reward_B, batch["reward"] / trainer.scale.scale())
    assert torch.equal(trainer.replay.gather_next(batch)[:, -6].mul(4).round().int(), held)


# --- Numbers that broke elsewhere -------------------------------------------------------------------------------------


def losses(updates: int, **settings: Any) -> list[float]:
    trainer = make(tiny_profile(train__epochs=1, train__updates_per_epoch=updates, **settings))
    found: list[float] = []

    def look(trainer: Trainer) -> None:
        sums, counts = trainer._averages.state_dict().values()
        found.append(float(sums["loss"]) / counts["loss"])

    trainer.fit(on_update=look)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.network.parameters())
    return found


@pytest.mark.parametrize(("batch", "capacity"), [(64, 5_000), (32, 1_024)])
def test_r29_losses_are_finite_for_each_batch_and_buffer(batch: int, capacity: int) -> None:
    found = losses(100, train__batch_size=batch, replay__capacity=capacity, replay__min_size=batch)
    assert len(found) == 100
    assert all(map(math.isfinite, found))


def test_r30_cql_of_1_is_finite() -> None:
    assert all(map(math.isfinite, losses(100, loss__cql_alpha=1.0)))


def test_r17_the_q_gap_grows_from_nothing() -> None:
    trainer = make(tiny_profile(network__output_scale=1e-6, train__epochs=1, train__updates_per_epoch=60))
    market = parts()[0]
    obs = np.zeros((50, market.features.shape[1] + dynamics.POSITION_FIELDS), np.float32)
    obs[:, :-6] = market.observed[500:550]
    obs[:, -2:] = 1

    def gap() -> float:
        q = trainer.agent(best=False).q_values(obs)
        return float((q.amax(2) - q.mean(2)).mean())

    before = gap()
    assert before < 1e-4
    gradient: list[float] = []
    step = trainer.optimizer.step

    def look(*args: Any) -> None:
        heads = trainer.network.output.weight.grad[11:]  # below the 11 value atoms
        gradient.append(float(heads.norm()))
        step(*args)

    trainer.optimizer.step = look
    trainer.fit()
    assert gradient[0] > 0
    assert gap() > 10 * before


def test_r20_the_gradient_of_the_entropy_is_small() -> None:
    trainer = make()
    trainer.fit()
    batch, _, weight = trainer.replay.sample()
    state = trainer.network.split_observation(trainer.replay.gather(batch))
    after = trainer.network.split_observation(trainer.replay.gather_next(batch))
    given = trainer._loss_batch(batch, weight)

    def gradient(entropy: float) -> torch.Tensor:
        trainer._coefficients.coef_4[2] = entropy
        result = total_loss(
            trainer.network(*state), trainer.network(*after), trainer.target(*after), given, trainer._coefficients
        )
        return torch.cat([g.flatten() for g in torch.autograd.grad(result.loss, list(trainer.network.parameters()))])

    without = gradient(0.0)
    assert 0 < (gradient(0.001) - without).norm() < 0.1 * without.norm()
