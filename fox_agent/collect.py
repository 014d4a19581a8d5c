"""Experience: many accounts play the market, and what lies between two decisions becomes one transition.

While the hold blocks an account every action is the same, so that only decisions are stored and a return spans the
whole lock. An n-step transition spans n decisions. Suffixes: B accounts, K branches, E exposures, S open windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fox_agent.ops.dist_loss import live_branches
from fox_agent.replay import pack_flags
from fox_env import Game, Market, actions, dynamics
from fox_env.engine import Engine

SCHEMA = 1
Transitions = dict[str, Tensor]
# Maps observations [B, D] to actions and greedy actions, int64 [B, K] each.
Actor = Callable[[Tensor], tuple[Tensor, Tensor]]


def sends_order(position_B: Tensor, max_contracts: int) -> Tensor:
    """Would exposure 3 · direction + magnitude send an order? bool [B, 9], positions in the agent's own frame."""
    targets_E = torch.as_tensor(actions.target_positions(max_contracts), device=position_B.device)
    return position_B.unsqueeze(1) != targets_E


def full_exposure_returns(market: Market) -> np.ndarray:
    """|Δclose| / close from each bar to the next, float64 [T]; without roll gaps, NaN where no position could carry."""
    close = market.bars.close
    change = np.diff(close, append=np.nan)
    change[:-1] -= np.where(market.roll[1:] == dynamics.MEASURED, market.gap[1:], 0.0)
    change[:-1][market.roll[1:] == dynamics.UNMEASURED] = np.nan
    return np.abs(change) / close


class _Accounts:
    """An engine's arrays as tensors that share its memory, and the state of its accounts as transitions keep it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        names = ("count", "money", "obs", "reward", "flags")
        self.count, self.money, self.obs, self.reward, self.flags = (torch.as_tensor(getattr(engine, n)) for n in names)
        self.rules = engine.rules

    def mirrored(self) -> Tensor:
        return self.count[dynamics.MIRRORED] != 0

    def can_trade(self) -> Tensor:
        return self.count[dynamics.AGE] >= self.rules.min_hold

    def position(self) -> Tensor:
        """Contracts in the agent's own frame, int32 [B]."""
        position = self.count[dynamics.POSITION]
        return torch.where(self.mirrored(), -position, position)

    def state(self) -> Transitions:
        """Bar and position fields, the exposure as in the original market."""
        fields = self.obs[:, -dynamics.POSITION_FIELDS : -2].clone()
        fields[:, 0] = self.count[dynamics.POSITION] / self.rules.max_contracts
        return {"bar": self.count[dynamics.BAR].clone(), "position_state": fields}

    def step(self, action_BK: Tensor) -> None:
        action = action_BK.to(torch.int32).contiguous()
        self.engine.step(action if self.engine.is_cuda else action.numpy())


class Collector:
    """Plays `num_envs` accounts and yields finished transitions.

    Args:
        market: the market to train on.
        game: its settings.
        num_envs: B.
        gamma: discount of a bar.
        n_step: decisions that a transition spans.
        counterfactual_share: share of the accounts that also try, on a copy, another action of one branch, with the
            other branches at their greedy action, until the lock that it starts has passed.
        device: of the engine.
        seed: of the game and of the counterfactual choices.
    """

    def __init__(
        self,
        market: Market,
        game: Game,
        num_envs: int,
        *,
        gamma: float,
        n_step: int,
        counterfactual_share: float,
        device: str,
        seed: int,
    ) -> None:
        self.gamma, self.n_step = gamma, n_step
        engine = Engine(market, game, num_envs, device, dynamics.NEXT_STEP)
        engine.seed(np.full(num_envs, seed), np.arange(num_envs))
        engine.reset()
        self.accounts = _Accounts(engine)
        self.device = torch.device(device)
        self._returns_T = torch.as_tensor(full_exposure_returns(market), device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        copies = round(counterfactual_share * num_envs)
        self._copies = _Accounts(Engine(market, game, copies, device, dynamics.DISABLED)) if copies else None
        # Windows that are open: where they began, and what they have earned since.
        s, b, k = n_step, num_envs, len(actions.BRANCHES)
        self._windows = {
            "bar": torch.zeros(s, b, dtype=torch.int32, device=self.device),
            "position_state": torch.zeros(s, b, 4, device=self.device),
            "action": torch.zeros(s, b, k, dtype=torch.uint8, device=self.device),
            "flags": torch.zeros(s, b, dtype=torch.uint8, device=self.device),
            "reward": torch.zeros(s, b, dtype=torch.float64, device=self.device),
            "discount": torch.ones(s, b, dtype=torch.float64, device=self.device),
        }
        self._open_SB = torch.zeros(s, b, dtype=torch.bool, device=self.device)
        self._decisions_B = torch.zeros(b, dtype=torch.int64, device=self.device)

    def step(self, actor: Actor) -> tuple[list[Transitions], Tensor]:
        """Play one bar in every account.

        Args:
            actor: chooses the actions; it sees every account, locked ones included, whose actions are ignored.

        Returns:
            Finished transitions in the form of `TransitionReplay.extend`, and the full-exposure returns of the bars
            played, float64 [any].
        """
        accounts = self.accounts
        action_BK, greedy_BK = actor(accounts.obs)
        alive_B = accounts.count[dynamics.DONE] == 0
        decides_B = accounts.can_trade() & alive_B
        state = accounts.state()
        finished = [self._close_oldest(decides_B, state)]
        if self._copies is not None:
            finished.append(self._counterfactuals(decides_B, greedy_BK, state))
        self._begin(decides_B, action_BK, greedy_BK, state)
        returns = self._returns_T[accounts.count[dynamics.BAR][alive_B].long()]
        accounts.step(action_BK)
        self._windows["reward"] += self._windows["discount"] * accounts.reward
        self._windows["discount"] *= self.gamma
        finished.append(self._close_all())
        return finished, returns[~returns.isnan()]

    def _slot(self) -> Tensor:
        return self._decisions_B % self.n_step

    def _begin(self, decides_B: Tensor, action_BK: Tensor, greedy_BK: Tensor, state: Transitions) -> None:
        """Open a window in each deciding account."""
        accounts, rows = self.accounts, decides_B.nonzero()[:, 0]
        slots = self._slot()[rows]
        live_BK = live_branches(action_BK, sends_order(accounts.position(), accounts.rules.max_contracts))
        # A branch learns only where the other live ones are greedy: over random directions a magnitude loses money in
        # each of its sizes, and the average would teach the smallest.
        strays_BK = live_BK & (action_BK != greedy_BK)
        live_BK &= strays_BK.sum(1, keepdim=True) == strays_BK
        values = {
            **state, "action": action_BK.to(torch.uint8), "flags": pack_flags(accounts.mirrored(), live_BK),
        }  # fmt: skip
        for name, value in values.items():
            self._windows[name][slots, rows] = value[rows]
        self._windows["reward"][slots, rows] = 0.0
        self._windows["discount"][slots, rows] = 1.0
        self._open_SB[slots, rows] = True
        self._decisions_B[rows] += 1

    def _close_oldest(self, decides_B: Tensor, state: Transitions) -> Transitions:
        """Finish the windows that have seen n decisions, at the state that the next decision sees."""
        slots = self._slot()
        rows = (decides_B & self._open_SB.gather(0, slots[None])[0]).nonzero()[:, 0]
        return self._emit(slots[rows], rows, state)

    def _close_all(self) -> Transitions:
        """Finish the windows of accounts whose episode ended in this step.

        A termination ends them without a bootstrap. A truncation bootstraps from its last state, if that is one to
        decide at: values of locked states are never learned, and windows that end in one are dropped.
        """
        accounts = self.accounts
        end_B = accounts.flags[dynamics.END]
        ended_B = end_B != dynamics.RUNNING
        if not ended_B.any():
            return {}
        terminated_B = end_B == dynamics.MARGIN_CALL
        self._windows["discount"][:, terminated_B] = 0.0
        slots, rows = (self._open_SB & (terminated_B | (ended_B & accounts.can_trade()))).nonzero().unbind(1)
        finished = self._emit(slots, rows, accounts.state())
        self._open_SB[:, ended_B] = False
        return finished

    def _emit(self, slots: Tensor, rows: Tensor, state: Transitions) -> Transitions:
        window = {name: value[slots, rows] for name, value in self._windows.items()}
        self._open_SB[slots, rows] = False
        return window | {f"next_{name}": value[rows] for name, value in state.items()}

    def _counterfactuals(self, decides_B: Tensor, greedy_BK: Tensor, state: Transitions) -> Transitions:
        """What one other action of one branch would have earned, for some of the deciding accounts."""
        accounts, copies = self.accounts, self._copies
        num = copies.engine.num_envs
        shuffled = torch.rand(len(decides_B), generator=self._generator, device=self.device)
        rows = torch.where(decides_B, shuffled, 2.0).argsort()[:num]
        draws = torch.randint(8, (num,), generator=self._generator, device=self.device)
        branch_C, change_C = draws // 2, 1 + draws % 2
        columns = torch.arange(num, device=self.device)
        action_CK = greedy_BK[rows].clone()
        action_CK[columns, branch_C] = (action_CK[columns, branch_C] + change_C) % 3
        send_CE = sends_order(accounts.position(), accounts.rules.max_contracts)[rows]
        own_CK = branch_C[:, None] == torch.arange(len(actions.BRANCHES), device=self.device)
        live_CK = live_branches(action_CK, send_CE) & own_CK
        copies.count.copy_(accounts.count[:, rows])
        copies.money.copy_(accounts.money[:, rows])
        copies.count[dynamics.DONE] = (~decides_B[rows]).int()
        waits_C = decides_B[rows] & live_CK.any(1)
        reward_C = torch.zeros(num, dtype=torch.float64, device=self.device)
        discount_C = torch.ones_like(reward_C)
        before = {**{name: value[rows] for name, value in state.items()}, "action": action_CK.to(torch.uint8)}
        before["flags"] = pack_flags(accounts.mirrored()[rows], live_CK)
        parts = []
        for _ in range(max(1, accounts.rules.min_hold)):
            copies.step(action_CK)
            reward_C += discount_C * copies.reward
            discount_C *= self.gamma
            end_C = copies.flags[dynamics.END]
            discount_C[end_C == dynamics.MARGIN_CALL] = 0.0
            arrives_C = waits_C & (copies.can_trade() | (end_C == dynamics.MARGIN_CALL))
            waits_C = waits_C & ~arrives_C & (end_C == dynamics.RUNNING)
            hit = arrives_C.nonzero()[:, 0]
            parts.append({
                **{name: value[hit] for name, value in before.items()},
                "reward": reward_C[hit], "discount": discount_C[hit],
                **{f"next_{name}": value[hit] for name, value in copies.state().items()},
            })  # fmt: skip
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def state_dict(self) -> dict[str, Any]:
        """Accounts, open windows and generator, as tensors (copies) and plain values."""
        engine = {f"engine.{k}": torch.as_tensor(v) for k, v in self.accounts.engine.state_dict().items()}
        windows = {f"windows.{k}": v.clone() for k, v in self._windows.items()}
        return {
            "schema": SCHEMA, **engine, **windows, "open": self._open_SB.clone(),
            "decisions": self._decisions_B.clone(), "generator": self._generator.get_state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; what follows equals, bit for bit, what would have followed `state_dict`.

        Raises:
            ValueError: the state is of another schema or number of accounts.
        """
        if state.get("schema") != SCHEMA:
            raise ValueError(f"the state of the collector has schema {state.get('schema')}, expected {SCHEMA}")
        engine = self.accounts.engine
        arrays = {name: state[f"engine.{name}"] for name in engine.state_dict()}
        engine.load_state_dict({n: a if engine.is_cuda else a.numpy() for n, a in arrays.items()})
        for name, value in self._windows.items():
            value.copy_(state[f"windows.{name}"])
        self._open_SB.copy_(state["open"])
        self._decisions_B.copy_(state["decisions"])
        self._generator.set_state(state["generator"])
