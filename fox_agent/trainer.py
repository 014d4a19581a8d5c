"""The learner: collect, learn, validate, keep the best, and stop if there is no edge."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fox_agent.agent import Agent
from fox_agent.checkpoint import load_state, save_state
from fox_agent.collect import Collector, sends_order
from fox_agent.diagnostics import Averages, q_statistics, verdict
from fox_agent.exploration import Schedule, select_actions
from fox_agent.losses import LossBatch, LossCoefficients, total_loss
from fox_agent.network import BranchingNetwork, soft_update
from fox_agent.normalization import AdaptiveSupport, RewardScale
from fox_agent.ops.dist_loss import expected_q
from fox_agent.ops.noise import advantage_noise
from fox_agent.profile import Profile, dump_profile
from fox_agent.replay import TransitionReplay, unpack_flags
from fox_env import Market, dynamics
from fox_env.actions import BRANCHES
from fox_env.backtest import Player
from fox_env.data.features import ORDER_FLOW
from fox_env.engine import game_of
from fox_env.files import write_atomic
from fox_env.report import policy_figures

STATE_FILE = "last.pt"
PROFILE_FILE = "profile.toml"
METRICS_FILE = "metrics.jsonl"
NO_EDGE = "no edge found"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt

Metrics = dict[str, Any]


def _keep_freed_memory() -> None:
    """Have glibc keep freed blocks: a learner step frees and takes the same megabytes, whose pages the system would
    otherwise take back and clear each time, at several times the cost of the step itself."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        agent: the agent to deploy; its policy is flat where the gate found no edge.
        verdict: in words.
        best_epoch: the epoch whose network it is.
        gate_t: its net profit on the validation part over that profit's standard error.
        epochs: epochs played.
    """

    agent: Agent
    verdict: str
    best_epoch: int
    gate_t: float
    epochs: int


def _order_flow(market: Market) -> list[int]:
    """Columns of the market's order-flow features."""
    return [column for column, name in enumerate(market.feature_names) if name in ORDER_FLOW]


class Trainer:
    """Trains one agent on one market.

    Everything is counted in updates and epochs, so that the same profile and seed give the same run, on one machine
    with the same versions and number of threads.

    Args:
        profile: every parameter.
        train: the market to learn from.
        valid: a later market, which chooses the best epoch and decides on deployment.
        out: folder for checkpoints, metrics and TensorBoard; None keeps nothing.
        device: ``"cpu"`` or a CUDA device.

    Raises:
        ValueError: the parts have different features, or are too short.
    """

    def __init__(
        self,
        profile: Profile,
        train: Market,
        valid: Market,
        *,
        out: str | os.PathLike | None = None,
        device: str = "cpu",
    ) -> None:
        if train.feature_names != valid.feature_names:
            raise ValueError("the training and the validation part have different features")
        self.profile, self.device = profile, torch.device(device)
        self.out = None if out is None else Path(out)
        if self.device.type == "cpu":
            _keep_freed_memory()
        if profile.train.threads:
            torch.set_num_threads(profile.train.threads)
        settings = profile.game.settings()
        self.game = game_of(train, settings)
        seed = profile.train.seed
        width, order_flow = len(train.feature_names), _order_flow(train)
        self._settings = {
            "network": {
                "num_features": width * self.game.window, "num_position": dynamics.POSITION_FIELDS,
                "gated": [bar * width + column for bar in range(self.game.window) for column in order_flow],
                **profile.network.model_dump(),
            },
            "game": dataclasses.asdict(self.game),
        }  # fmt: skip
        self._gate_epoch = profile.train.ofi_start_epoch if order_flow else 0
        if self._gate_epoch >= profile.train.epochs:
            warnings.warn(
                f"train.ofi_start_epoch is {self._gate_epoch} and train.epochs {profile.train.epochs}: the agent will "
                "never see the market's order flow",
                stacklevel=2,
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = BranchingNetwork(**self._settings["network"]).to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.network.parameter_groups(profile.train.weight_decay), lr=profile.train.learning_rate,
            eps=profile.train.adam_eps,
        )  # fmt: skip
        self.support = AdaptiveSupport(profile.loss.support, gamma=profile.loss.gamma, device=self.device)
        self.scale = RewardScale(profile.loss.reward_normalization, self.device)
        self.collector = Collector(
            train, self.game, profile.collect.num_envs, gamma=profile.loss.gamma, n_step=profile.loss.n_step,
            counterfactual_share=profile.collect.counterfactual_share, device=device, seed=seed,
        )  # fmt: skip
        self.replay = TransitionReplay(
            profile.replay.capacity, profile.train.batch_size,
            torch.as_tensor(train.observed, device=self.device), torch.tensor(train.fraction_left),
            mirror=torch.as_tensor(train.mirror), window=self.game.window, first_bar=torch.as_tensor(train.first),
            alpha=profile.replay.alpha, beta=profile.replay.beta_start, eps=profile.replay.eps, seed=seed,
        )  # fmt: skip
        self._player = Player(valid, device=device, **settings)
        self._valid_sessions = len(np.unique(valid.session))
        self._markets = [train.fingerprint, valid.fingerprint]
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._noise = torch.tensor([seed, 0], dtype=torch.int64, device=self.device)
        self._coefficients = LossCoefficients(
            coef_4=torch.zeros(4, device=self.device),
            lambda_iqn=torch.tensor(profile.loss.iqn_lambda, device=self.device),
            support_2=self.support.bounds, smoothing_kind=profile.loss.smoothing,
            ce_clamp=profile.loss.max_per_sample_ce, iqn_primary_loss=profile.loss.iqn_primary_loss,
        )  # fmt: skip
        self._epsilon = torch.zeros((), device=self.device)
        self._averages = Averages()
        self.epoch = self.update_count = self.env_steps = self._tau_from = 0
        self.best: dict[str, Any] = {"net": -float("inf"), "epoch": -1, "gate_t": 0.0}
        self._best_network = copy.deepcopy(self.target.state_dict())
        self._best_support = self.support.bounds.clone()
        self._feature_names, self._normalizer = train.feature_names, train.normalizer
        self._owed_steps = 0.0
        self._stops = False

    # Experience

    @torch.no_grad()
    def _act(self, obs_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Exploring and greedy actions for the collector."""
        explore = self.profile.exploration
        self._noise[1] += 1
        self.network.resample_noise(self._noise)
        output = self.network(*self.network.split_observation(obs_BD))
        q_BKM = expected_q(output.value_BN, output.adv_BKMN, self.support.bounds)
        noisy_BKM = q_BKM
        if explore.noise_sigma:
            noisy_BKM = advantage_noise(q_BKM, self._noise, explore.noise_sigma, explore.noise_relative)
        action_BK, non_greedy = select_actions(
            noisy_BKM, epsilon=self._epsilon, temperature=explore.temperature or None,
            single_branch_share=explore.single_branch_share, generator=self._generator,
        )  # fmt: skip
        self._averages.add({"non_greedy": non_greedy})
        return action_BK, q_BKM.argmax(2)

    def _collect(self) -> None:
        """Play one bar in every environment and store what was finished."""
        finished, returns = self.collector.step(self._act)
        for transitions in finished:
            if transitions and len(transitions["bar"]):
                self.replay.extend(transitions)
                if self.scale.kind == "reward":
                    self.scale.update(transitions["reward"])
        if self.scale.kind == "market":
            self.scale.update(returns)
        self.env_steps += self.profile.collect.num_envs

    # Learning

    def _schedules(self) -> None:
        """Write the coefficients of the next update, and of the collecting before it, to the device."""
        profile, loss = self.profile, self.profile.loss
        warmup = loss.c51_warmup_epochs * profile.train.updates_per_epoch
        alpha = Schedule(0.0, loss.c51_alpha_max, warmup).value(self.update_count)
        values = (alpha, loss.cql_alpha, loss.entropy_coefficient, loss.smoothing_strength)
        self._coefficients.coef_4.copy_(torch.tensor(values))
        explore = profile.exploration
        epsilon = Schedule(explore.epsilon_start, explore.epsilon_end, explore.epsilon_steps)
        self._epsilon.fill_(epsilon.value(self.update_count))
        total = profile.train.epochs * profile.train.updates_per_epoch
        beta = Schedule(profile.replay.beta_start, profile.replay.beta_end, total)
        self.replay.priorities.set_beta(beta.value(self.update_count))

    def _set_gate(self) -> None:
        """Order flow is seen from its epoch on, by both networks at once. Stored transitions hold no features, so that
        they are seen in the same way."""
        for network in (self.network, self.target):
            network.set_gate(self.epoch >= self._gate_epoch)

    def _tau(self) -> float:
        train = self.profile.train
        return Schedule(train.tau_start, train.tau, train.tau_anneal_updates).value(self.update_count - self._tau_from)

    def _loss_batch(self, batch: Mapping[str, Tensor], weight_B: Tensor) -> LossBatch:
        _, live_BK = unpack_flags(batch["flags"])
        position_B = self._positions(batch, "next_position_state")
        return LossBatch(
            action_BK=batch["action"].long(), reward_B=batch["reward"] / self.scale.scale(),
            discount_B=batch["discount"], weight_B=weight_B, branch_weight_BK=live_BK.float(),
            next_send_BE=sends_order(position_B, self.game.max_contracts),
        )  # fmt: skip

    def _positions(self, batch: Mapping[str, Tensor], state: str) -> Tensor:
        """Contracts in the agent's own frame, float32 [B]."""
        mirrored_B, _ = unpack_flags(batch["flags"])
        position_B = (batch[state][:, 0] * self.game.max_contracts).round()
        return torch.where(mirrored_B, -position_B, position_B)

    def _update(self) -> None:
        """One learner step."""
        network, train = self.network, self.profile.train
        batch, index_B, weight_B = self.replay.sample()
        network.resample_noise(self._noise)
        online = network(*network.split_observation(self.replay.gather(batch)))
        with torch.no_grad():
            after = network.split_observation(self.replay.gather_next(batch))
            next_online, next_target = network(*after), self.target(*after)
        result = total_loss(online, next_online, next_target, self._loss_batch(batch, weight_B), self._coefficients)
        result.loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), train.gradient_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tau = self._tau()
        soft_update(self.target, network, tau)
        self.replay.update(index_B, result.priority_B)
        self.support.step(result.terms["outside"], tau)
        ranges = {"priority_max": result.priority_B.max(), "weight_min": weight_B.min()}
        self._averages.add({**result.terms, **ranges, "grad_norm": norm})
        if self.update_count % train.updates_per_epoch % 50 == 0:  # in every epoch, however short
            send_BE = sends_order(self._positions(batch, "position_state"), self.game.max_contracts)
            self._averages.add(q_statistics(online.value_BN, online.adv_BKMN, self.support.bounds, send_BE))
        self.update_count += 1

    # The run

    def agent(self, *, best: bool = True) -> Agent:
        """The agent of the best epoch so far, or as it stands: the averaged network, which is the steadier one."""
        network = copy.deepcopy(self.target)
        network.clear_noise()
        support = self.support.bounds.clone()
        if best:
            network.load_state_dict(self._best_network)
            support = self._best_support.clone()
        return Agent(
            network, support, self._settings, self._feature_names, self._normalizer,
            deployed=self._passes_gate(), trade_margin=self.profile.gate.trade_margin,
        )  # fmt: skip

    def _passes_gate(self) -> bool:
        gate, t = self.profile.gate, self.best["gate_t"]
        return self._valid_sessions >= gate.min_sessions and math.isfinite(t) and t > gate.standard_errors

    def fit(
        self,
        *,
        resume: bool = False,
        on_update: Callable[[Trainer], None] | None = None,
        on_epoch: Callable[[Metrics], None] | None = None,
    ) -> TrainResult:
        """Train to the end of the profile's epochs, or until validation has not improved for too long.

        Args:
            resume: go on from the last checkpoint in `out`.
            on_update: called after each update.
            on_epoch: called with each epoch's metrics.

        Raises:
            FileNotFoundError: there is nothing to resume.
            ValueError: `out` holds a run already, or one to resume that was trained with another profile or market.
            FloatingPointError: the loss is not finite.
            KeyboardInterrupt: after `stop`.
        """
        train = self.profile.train
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            if resume:
                self.load_checkpoint(self.out / STATE_FILE)
            elif (self.out / STATE_FILE).exists():
                raise ValueError(f"{self.out} holds a run already; resume it or choose another folder")
            else:
                (self.out / METRICS_FILE).unlink(missing_ok=True)  # of a run that did not come to a checkpoint
            write_atomic(self.out / PROFILE_FILE, lambda partial: partial.write_text(dump_profile(self.profile)))
        board = self._board()
        while self.epoch < train.epochs and not self._is_stale():
            self._set_gate()
            while self.update_count < (self.epoch + 1) * train.updates_per_epoch:
                self._schedules()
                self._owed_steps += self.profile.collect.steps_per_update
                while self._owed_steps >= 1 or len(self.replay) < self.profile.replay.min_size:
                    self._collect()
                    self._owed_steps = max(0.0, self._owed_steps - 1)
                self._update()
                if on_update:
                    on_update(self)
                if self._stops:
                    self._stops = False
                    if self.out is not None:
                        self.save_checkpoint(self.out / STATE_FILE)
                    raise KeyboardInterrupt
            metrics = self._validate()
            self.epoch += 1
            self._record(metrics, board)
            if on_epoch:
                on_epoch(metrics)
        return self.result()

    def _validate(self) -> Metrics:
        """Play the validation part, keep the best network, and gather the epoch's figures."""
        agent = self.agent(best=False)
        agent.deployed = True  # to be judged
        record = self._player.play(agent)
        summary = policy_figures(record, resamples=0)  # of the bootstrap, which nobody reads here
        metrics: Metrics = {"epoch": self.epoch, "updates": self.update_count, "env_steps": self.env_steps}
        metrics |= self._averages.read()
        metrics |= {"support": float(self.support.bounds[1]), "reward_sigma": float(self.scale.scale())}
        if self.network.gated:
            metrics["order_flow_shown"] = self.epoch >= self._gate_epoch
        for name in ("net_pnl_usd", "sharpe", "trades", "mean_abs_exposure", "cost_usd"):
            metrics[f"valid_{name}"] = float(summary[name] or 0.0)
        metrics["valid_trades_a_session"] = metrics["valid_trades"] / max(1, self._valid_sessions)
        metrics["valid_exposures"] = summary["exposure_histogram"]
        decided = record.action[record.can_trade]
        metrics["valid_actions"] = [
            (np.bincount(decided[:, k], minlength=n) / max(1, len(decided))).tolist() for k, n in enumerate(BRANCHES)
        ]
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of epoch {self.epoch} is {metrics['loss']}")
        metrics["verdict"] = verdict({k: v for k, v in metrics.items() if isinstance(v, float)})
        metrics["valid_t"] = record.edge_t  # not finite where there are too few sessions to tell
        if summary["net_pnl_usd"] > self.best["net"]:
            self.best = {"net": summary["net_pnl_usd"], "epoch": self.epoch, "gate_t": metrics["valid_t"]}
            self._best_network = copy.deepcopy(self.target.state_dict())
            self._best_support = self.support.bounds.clone()
            if self.out is not None:
                self.agent().save(self.out / "best")
        # The target network follows slowly again when the scale of what it estimates has changed.
        if bool(self.scale.jumped(self.profile.train.tau_restart_ratio)):
            self._tau_from = self.update_count
        return metrics

    def stop(self) -> None:
        """Have `fit` end after the present update: it keeps a checkpoint and raises KeyboardInterrupt."""
        self._stops = True

    def _is_stale(self) -> bool:
        patience = self.profile.train.early_stopping_epochs
        # Before its order flow is shown, an agent has not been given its chance.
        return patience > 0 and self.epoch - 1 - max(self.best["epoch"], self._gate_epoch - 1) >= patience

    def result(self) -> TrainResult:
        """The best agent through the gate; see `TrainResult`."""
        agent, gate = self.agent(), self.profile.gate
        if self._valid_sessions < gate.min_sessions:
            sentence = f"validation has {self._valid_sessions} sessions, the gate asks for {gate.min_sessions}"
        else:
            sentence = (
                f"validation net profit is {self.best['gate_t']:.1f} of its standard errors, the gate asks for "
                f"{gate.standard_errors:g}"
            )
        if self.out is not None:
            agent.save(self.out / "best")
        outcome = "deployed" if agent.deployed else NO_EDGE
        return TrainResult(agent, f"{outcome}: {sentence}", self.best["epoch"], self.best["gate_t"], self.epoch)

    # What a run keeps

    def _board(self) -> Any:
        if self.out is None:
            return None
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        return TensorboardLogger(exp_name="tensorboard", log_dir=str(self.out))

    def _record(self, metrics: Metrics, board: Any) -> None:
        if self.out is None:
            return
        with (self.out / METRICS_FILE).open("a") as file:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
            file.write(json.dumps(finite, allow_nan=False) + "\n")
        for name, value in metrics.items():
            if isinstance(value, float):
                board.log_scalar(name, value, step=self.update_count)
        self.save_checkpoint(self.out / STATE_FILE)

    def save_checkpoint(self, path: str | os.PathLike) -> None:
        """Write everything that the next update depends on, in one step."""
        lines = None if self.out is None else self.out / METRICS_FILE
        written = lines.stat().st_size if lines is not None and lines.exists() else 0
        save_state(path, {
            "profile": dump_profile(self.profile), "markets": self._markets, "network": self.network.state_dict(),
            "target": self.target.state_dict(), "optimizer": self.optimizer.state_dict(),
            "support": self.support.state_dict(), "scale": self.scale.state_dict(),
            "collector": self.collector.state_dict(), "replay": self.replay.state_dict(),
            "generator": self._generator.get_state(), "noise": self._noise.clone(), "best": self.best,
            "best_network": self._best_network, "best_support": self._best_support,
            "averages": self._averages.state_dict(), "counters": {
                "epoch": self.epoch, "update_count": self.update_count, "env_steps": self.env_steps,
                "tau_from": self._tau_from, "owed_steps": self._owed_steps,
            },
            "metrics_bytes": written,
        })  # fmt: skip

    def load_checkpoint(self, path: str | os.PathLike) -> None:
        """Restore what `save_checkpoint` wrote; the run goes on as if it had never stopped.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a checkpoint, or one of another profile or market.
        """
        state = load_state(path)
        if state["profile"] != dump_profile(self.profile):
            raise ValueError(f"checkpoint {path} was made with another profile")
        if state["markets"] != self._markets:
            raise ValueError(f"checkpoint {path} was made with another market")
        self.network.load_state_dict(state["network"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("support", "scale", "collector", "replay"):
            getattr(self, name).load_state_dict(state[name])
        self._generator.set_state(state["generator"])
        self._noise.copy_(state["noise"])
        self.best, self._best_network, self._best_support = state["best"], state["best_network"], state["best_support"]
        self._best_support = self._best_support.to(self.device)
        self._averages.load_state_dict(state["averages"])
        counters = state["counters"]
        self.epoch, self.update_count, self.env_steps = (
            counters["epoch"],
            counters["update_count"],
            counters["env_steps"],
        )
        self._tau_from, self._owed_steps = counters["tau_from"], counters["owed_steps"]
        if self.out is not None:
            # Lines written after the checkpoint will be written again.
            with (self.out / METRICS_FILE).open("ab") as file:
                file.truncate(state["metrics_bytes"])
