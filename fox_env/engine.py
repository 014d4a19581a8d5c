"""A batch of accounts on one market: the arrays of the game, and `fox_env.dynamics` compiled over them.

The faces (`vector_env`, `torchrl_env`), the back-test and the learner's collector all step an `Engine`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import warnings
import zlib
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fox_env import actions, costs, dynamics, rewards
from fox_env.market import Market

SEED_LIMIT = 1 << 63


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(np.isfinite(value))


@dataclass(frozen=True)
class Game:
    """The game's settings. Every field is a keyword of the environments.

    Args:
        max_contracts: contracts of a Full position, at least 1.
        min_hold_bars: bars between a change of the position and the next order, at least 0.
        spread_ticks: quoted spread where the market has no quotes, in ticks.
        commission_usd_per_side: dollars a contract and side; None takes the contract's own.
        commission_bps_round_trip: instead of dollars, basis points of the close for a round trip.
        fill_rule: ``"through"`` fills a resting limit when price trades a tick beyond it; ``"touch"`` when it is
            touched, which is optimistic.
        depth_contracts: contracts a price level where the market shows no size; None for unlimited.
        initial_equity_usd: equity at reset.
        episode_bars: steps of an episode before it is truncated; 0 plays to the end of the data.
        flat_at_close: close positions at each session's last bar.
        margin: test margin after each step.
        mirror_prob: probability that an episode is played in the mirror.
        window: bars of market features in an observation, oldest first.
        shaping: coefficients of the shaping terms by name (`fox_env.rewards.Shaping`).
        hindsight_lookahead: bars ahead of the hindsight term.

    Raises:
        ValueError: a value out of range, named.
    """

    max_contracts: int = 4
    min_hold_bars: int = 10
    spread_ticks: float = 1.0
    commission_usd_per_side: float | None = None
    commission_bps_round_trip: float | None = None
    fill_rule: str = "through"
    depth_contracts: int | None = None
    initial_equity_usd: float = 200_000.0
    episode_bars: int = 1_000
    flat_at_close: bool = False
    margin: bool = True
    mirror_prob: float = 0.0
    window: int = 1
    shaping: dict[str, float] = field(default_factory=dict)
    hindsight_lookahead: int = 10

    def __post_init__(self) -> None:
        least = {
            "max_contracts": 1, "min_hold_bars": 0, "depth_contracts": 1, "episode_bars": 0, "window": 1,
            "hindsight_lookahead": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if name == "depth_contracts" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value < 1 << 30:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least {low}")
        for name in ("flat_at_close", "margin"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"{name} is {value!r}, expected True or False")
        if not (_is_finite(self.spread_ticks) and self.spread_ticks >= 0):
            raise ValueError(f"spread_ticks is {self.spread_ticks!r}, expected zero or a positive number")
        if not (_is_finite(self.initial_equity_usd) and self.initial_equity_usd > 0):
            raise ValueError(f"initial_equity_usd is {self.initial_equity_usd!r}, expected a positive number")
        if not (_is_finite(self.mirror_prob) and 0.0 <= self.mirror_prob <= 1.0):
            raise ValueError(f"mirror_prob is {self.mirror_prob!r}, expected a probability in [0, 1]")
        if self.fill_rule not in ("through", "touch"):
            raise ValueError(f"fill_rule is {self.fill_rule!r}, expected 'through' or 'touch'")
        for name, value in self.shaping.items():
            if name not in rewards.SHAPING_TERMS or not _is_finite(value):
                raise ValueError(
                    f"shaping {name}={value!r}, expected finite numbers for {', '.join(rewards.SHAPING_TERMS)}"
                )

    @property
    def is_shaped(self) -> bool:
        """Whether any shaping coefficient is not 0."""
        return any(self.shaping.values())

    def rules(self, market: Market) -> dynamics.Rules:
        """The constants of `step_one` on that market."""
        contract = market.contract
        fixed, rate = costs.commission_terms(contract, self.commission_usd_per_side, self.commission_bps_round_trip)
        return dynamics.Rules(
            max_contracts=int(self.max_contracts),
            tick=contract.tick,
            multiplier=contract.multiplier,
            commission_points=fixed,
            commission_rate=rate,
            min_hold=int(self.min_hold_bars),
            free_age=2 * max(1, int(self.min_hold_bars)),
            touch=int(self.fill_rule == "touch"),
            depth=int(self.depth_contracts or 0),
            flat_at_close=int(self.flat_at_close),
            margin=int(self.margin),
            intraday_usd=contract.intraday_margin_usd,
            initial_equity_usd=float(self.initial_equity_usd),
        )

    def starts(self, market: Market) -> np.ndarray:
        """Bars at which a drawn episode may start (int32): decision bars with a whole episode ahead.

        Raises:
            ValueError: the market is shorter than an episode.
        """
        decisions = np.flatnonzero(market.decision).astype(np.int32)
        ahead = max(1, self.episode_bars)
        if len(decisions) <= ahead:
            raise ValueError(
                f"the market has {len(decisions)} bars to decide at, expected more than episode_bars = {ahead}"
            )
        return decisions[: len(decisions) - ahead]

    def tape(self, market: Market) -> np.ndarray:
        """The market as rows for `step_one`, float64 [T, 16]."""
        lookahead = self.hindsight_lookahead if self.shaping.get("hindsight") else 0
        return market.tape(self.spread_ticks, lookahead)


def game_of(market: Market, settings: dict) -> Game:
    """The game with `settings` over the market's own defaults (`Market.game`).

    Raises:
        TypeError: a setting that does not exist, named.
    """
    unknown = set(settings) - set(Game.__dataclass_fields__)
    if unknown:
        raise TypeError(
            f"unknown setting {sorted(unknown)[0]!r}, expected one of {', '.join(Game.__dataclass_fields__)}"
        )
    return Game(**{**market.game, **settings})


def observation_bounds(market: Market, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest observation, float32 [window·F + 6] each."""
    features = window * market.features.shape[1]
    low = np.full(features + dynamics.POSITION_FIELDS, -10.0, np.float32)
    low[features:] = (-1.0, -10.0, 0.0, 0.0, 0.0, 0.0)
    high = np.full(features + dynamics.POSITION_FIELDS, 10.0, np.float32)
    high[features:] = (1.0, 10.0, 2.0, 10.0, 1.0, 1.0)
    return low, high


# Functions that a batch step calls, callees first.
_COMPILED = (
    actions.target_position, rewards.base_reward, rewards.visit_entropy, rewards.shaping_terms,
    dynamics.walk_ticks, dynamics.step_one, dynamics.position_fields, dynamics.philox, dynamics.draw_episode,
    dynamics.read_row, dynamics.reset_account, dynamics.reset_random, dynamics.window_row, dynamics.feature,
    dynamics.write_features, dynamics.write_position, dynamics.restart, dynamics.advance,
)  # fmt: skip


def compile_rule(jit) -> dict[str, object]:
    """Compile the rule's functions with `jit`, each bound to the compiled forms of those that it calls."""
    names = {**vars(rewards), **vars(dynamics)}
    for function in _COMPILED:
        bound = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        names[function.__name__] = jit(bound)
    return names


def _source_stamp() -> int:
    """Checksum of the rule's sources: numba's disk cache looks at the kernel's own file only."""
    stamp = 0
    for module in (actions, rewards, dynamics):
        stamp = zlib.crc32(Path(module.__file__).read_bytes(), stamp)
    return stamp


# Below this many accounts waking the threads, which spin while they wait, costs more than they save.
_PARALLEL_FROM = 512

# Accounts between the one that is stepped and the one whose rows are fetched from memory.
_FETCH_AHEAD = 8

# The kernels only use arrays that their caller holds. Counting references to them, atomically and for each account,
# took most of a step.
_CPU_OPTIONS = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def _prefetch_intrinsic() -> object:
    """``prefetch(array, row, column)``: ask for the cache line of an element, which may lie outside the array."""
    import numba
    from llvmlite import ir
    from numba.core import cgutils

    @numba.extending.intrinsic
    def prefetch(typing_context, array, row, column):
        def generate(context, builder, signature, arguments):
            kind = signature.args[0]
            view = context.make_array(kind)(context, builder, arguments[0])
            element = cgutils.get_item_pointer(context, builder, kind, view, list(arguments[1:]))
            flag, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
            callee = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
            function = cgutils.get_or_insert_function(builder.module, callee, "llvm.prefetch.p0i8")
            # To read, into every level of the cache, as data.
            builder.call(function, [builder.bitcast(element, pointer), flag(0), flag(3), flag(1)])
            return context.get_dummy_value()

        return numba.types.void(array, numba.types.intp, numba.types.intp), generate

    return prefetch


def _start_threads() -> None:
    """Start numba's threads. That sets OpenMP's number of threads, which is torch's too: put torch's back."""
    import numba

    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    numba.get_num_threads()
    if torch:
        torch.set_num_threads(threads)


@functools.cache
def _cpu_rule() -> dict[str, object]:
    """The rule's functions compiled for the CPU, and what else its kernels call."""
    import numba

    _start_threads()
    names = compile_rule(numba.njit(forceinline=True, no_cpython_wrapper=True, **_CPU_OPTIONS))
    return names | {"prange": numba.prange, "prefetch": _prefetch_intrinsic(), "FETCH_AHEAD": _FETCH_AHEAD}


@functools.cache
def _cpu_kernels(parallel: bool) -> tuple[object, object]:
    import numba

    names = _cpu_rule()
    stamp = _source_stamp()

    def step_batch(
        tape, table, fraction, land, first, starts, mirror, keys, count, money, actions,
        obs, final_obs, reward, terms, points, flags, window, episode_bars, mirror_prob, autoreset, close_at_stop,
        rules, shaping, shaped,
    ):  # fmt: skip
        stamp  # noqa: B018  a closure's values are part of the cache's key
        for i in prange(count.shape[1]):  # noqa: F821
            # Accounts stand at bars anywhere in a market larger than the caches: fetch rows before they are needed.
            ahead = count[0, min(i + FETCH_AHEAD, count.shape[1] - 1)] + 1  # noqa: F821
            prefetch(tape, ahead, 0)  # noqa: F821
            prefetch(tape, ahead, 8)  # noqa: F821
            for column in range(0, table.shape[1], 16):
                prefetch(table, ahead, column)  # noqa: F821
            advance(  # noqa: F821
                i, obs, i, window * table.shape[1], tape, table, fraction, land, first, starts, mirror, keys, count,
                money, actions, final_obs, reward, terms, points, flags, window, episode_bars, mirror_prob, autoreset,
                close_at_stop, rules, shaping, shaped,
            )  # fmt: skip
            write_features(i, obs, table, first, mirror, count, window)  # noqa: F821

    def reset_batch(
        mask, given, tape, table, fraction, land, first, starts, mirror, keys, count, money, obs, window, mirror_prob,
        rules,
    ):  # fmt: skip
        stamp  # noqa: B018
        for i in prange(count.shape[1]):  # noqa: F821
            restart(  # noqa: F821
                i, obs, i, window * table.shape[1], mask, given, tape, fraction, land, starts, keys, count, money,
                mirror_prob, rules,
            )  # fmt: skip
            write_features(i, obs, table, first, mirror, count, window)  # noqa: F821

    def build(kernel):
        bound = types.FunctionType(kernel.__code__, names, kernel.__name__, None, kernel.__closure__)
        bound.__qualname__ = kernel.__name__ + ("_parallel" if parallel else "")
        return numba.njit(parallel=parallel, cache=True, **_CPU_OPTIONS)(bound)

    return build(step_batch), build(reset_batch)


@functools.cache
def _cuda_kernels(
    window: int, autoreset: int, shaped: int, mirror: int, accounts: int, rows: int
) -> tuple[object, object]:
    """The kernels of a kind of game: what is not used is compiled out of them.

    A block has `accounts` accounts. A thread plays an account; then the threads of the block write observations, a warp
    `rows` of them at a time, so that as many loads are under way at once. A thread that wrote its account's row alone
    would write where no neighbour writes, a sector of memory for a number.
    """
    # numba-cuda still asks for a name that numpy 2.5 dropped.
    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack  # noqa: NPY201
    from numba import cuda, float32, int32, uint64

    names = compile_rule(cuda.jit(device=True))
    names |= {
        "cuda": cuda, "float32": float32, "int32": int32, "uint64": uint64, "WINDOW": window, "AUTORESET": autoreset,
        "SHAPED": shaped, "MIRROR": mirror, "ACCOUNTS": accounts, "ROWS": rows, "FIELDS": dynamics.POSITION_FIELDS,
        "BANKS": dynamics.POSITION_FIELDS + 1,
    }  # fmt: skip

    def bound(kernel):
        return types.FunctionType(kernel.__code__, names, kernel.__name__, None, kernel.__closure__)

    @cuda.jit(device=True)
    @bound
    def write_block(begin, fields, obs, table, first, mirror, count):
        """Observations of the block's accounts, by all its threads; `fields` has the position fields."""
        bars = cuda.shared.array(ACCOUNTS, int32)  # noqa: F821
        mirrors = cuda.shared.array(ACCOUNTS, int32)  # noqa: F821
        thread = cuda.threadIdx.x
        if thread < ACCOUNTS:  # noqa: F821
            account = min(begin + thread, count.shape[1] - 1)
            bars[thread] = count[0, account]
            mirrors[thread] = count[5, account]
        cuda.syncthreads()
        here = min(ACCOUNTS, count.shape[1] - begin)  # noqa: F821
        features = table.shape[1]
        values = cuda.local.array(ROWS, float32)  # noqa: F821
        for a in range(ROWS * (thread // 32), here, ROWS * (cuda.blockDim.x // 32)):  # noqa: F821
            for w in range(WINDOW):  # noqa: F821
                for j in range(thread % 32, features, 32):
                    for k in range(ROWS):  # noqa: F821
                        # Of an unsigned index numba does not ask whether it counts from the end.
                        row = uint64(window_row(bars[uint64(a + k)], WINDOW - 1 - w, first))  # noqa: F821
                        mirrored = mirrors[uint64(a + k)] if MIRROR != 0 else 0  # noqa: F821
                        values[k] = feature(table, mirror, row, uint64(j), mirrored)  # noqa: F821
                    for k in range(ROWS):  # noqa: F821
                        if a + k < here:
                            obs[uint64(begin + a + k), uint64(w * features + j)] = values[k]
        for k in range(thread, here * FIELDS, cuda.blockDim.x):  # noqa: F821
            seat, j = k // FIELDS, k % FIELDS  # noqa: F821
            obs[uint64(begin + seat), uint64(WINDOW * features + j)] = fields[uint64(seat), uint64(j)]  # noqa: F821

    def step_batch(
        tape, table, fraction, land, first, starts, mirror, keys, count, money, actions,
        obs, final_obs, reward, terms, points, flags, window, episode_bars, mirror_prob, autoreset, close_at_stop,
        rules, shaping, shaped,
    ):  # fmt: skip
        # A column more than needed, so that the threads of a warp use different banks.
        fields = cuda.shared.array((ACCOUNTS, BANKS), float32)  # noqa: F821
        begin = cuda.blockIdx.x * ACCOUNTS  # noqa: F821
        thread = cuda.threadIdx.x
        if thread < min(ACCOUNTS, count.shape[1] - begin):  # noqa: F821
            advance(  # noqa: F821
                uint64(begin + thread), fields, uint64(thread), 0, tape, table, fraction, land, first,
                starts, mirror, keys, count, money, actions, final_obs, reward, terms, points, flags, WINDOW,  # noqa: F821
                episode_bars, mirror_prob, AUTORESET, close_at_stop, rules, shaping, SHAPED,  # noqa: F821
            )  # fmt: skip
        write_block(begin, fields, obs, table, first, mirror, count)

    def reset_batch(
        mask, given, tape, table, fraction, land, first, starts, mirror, keys, count, money, obs, window, mirror_prob,
        rules,
    ):  # fmt: skip
        fields = cuda.shared.array((ACCOUNTS, BANKS), float32)  # noqa: F821
        begin = cuda.blockIdx.x * ACCOUNTS  # noqa: F821
        thread = cuda.threadIdx.x
        if thread < min(ACCOUNTS, count.shape[1] - begin):  # noqa: F821
            restart(  # noqa: F821
                uint64(begin + thread), fields, uint64(thread), 0, mask, given, tape, fraction, land,
                starts, keys, count, money, mirror_prob, rules,
            )  # fmt: skip
        write_block(begin, fields, obs, table, first, mirror, count)

    return cuda.jit(bound(step_batch)), cuda.jit(bound(reset_batch))


def block_shape(num_envs: int) -> tuple[int, int, int]:
    """Accounts and threads of a block, and rows that a warp writes at a time; measured on an H200.

    A small batch has few accounts a block, so that every core has work and a warp few ways through the rule.
    """
    return (4, 32, 4) if num_envs <= 16_384 else (32, 32, 16)


class Engine:
    """`num_envs` accounts that play one market side by side, stepped by one compiled call.

    On the CPU every array is numpy, on CUDA a torch tensor of the same shape and dtype; they are overwritten by each
    call. N is `num_envs`, F the number of features, W the window.

    Args:
        market: the market that all accounts play.
        game: the settings.
        num_envs: N.
        device: ``"cpu"``, or a CUDA device for the kernel through numba-cuda.
        autoreset: `dynamics.NEXT_STEP`, `SAME_STEP` or `DISABLED`.
        close_at_stop: close each account's position at the close of its last bar.

    Attributes:
        obs, final_obs: float32 [N, W·F + 6]. `final_obs` is filled with SAME_STEP only.
        reward: [N], float64 on the CPU, float32 on CUDA.
        terms: shaping terms, float64 [4, N].
        points: float64 [5, N]: pnl, gross, cost, fill price, equity in dollars.
        flags: int32 [7, N]: filled, forced, rolled, can trade, end reason, bar observed, position.
        count: int32 [11, N] and money: float64 [3, N], the accounts (`fox_env.dynamics`).
        keys: int64 [2, N], seed and environment number of each account's generator.

    Raises:
        ValueError: the market is shorter than an episode, `num_envs` is not a positive integer, or `device` is neither
            the CPU nor a CUDA device.
        ImportError: a CUDA device without numba-cuda.
    """

    def __init__(
        self,
        market: Market,
        game: Game,
        num_envs: int,
        device: object = "cpu",
        autoreset: int = dynamics.NEXT_STEP,
        close_at_stop: bool = False,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ValueError(f"num_envs is {num_envs!r}, expected an integer of at least 1")
        self.market, self.game, self.num_envs, self.device = market, game, int(num_envs), str(device)
        self.rules = game.rules(market)
        self.shaping = rewards.Shaping(**{name: float(value) for name, value in game.shaping.items()})
        self.autoreset, self.close_at_stop = int(autoreset), int(close_at_stop)
        self.is_cuda = _is_cuda(self.device)
        low, _ = observation_bounds(market, game.window)
        n = self.num_envs
        shapes = {
            "count": ((dynamics.COUNT_ROWS, n), np.int32),
            "money": ((dynamics.MONEY_ROWS, n), np.float64),
            "keys": ((2, n), np.int64),
            "obs": ((n, len(low)), np.float32),
            "final_obs": ((n, len(low)) if autoreset == dynamics.SAME_STEP else (1, 1), np.float32),
            "reward": ((n,), np.float32 if self.is_cuda else np.float64),
            "terms": ((4, n if game.is_shaped else 1), np.float64),
            "points": ((dynamics.POINTS_ROWS, n), np.float64),
            "flags": ((dynamics.FLAGS_ROWS, n), np.int32),
        }
        for name, (shape, dtype) in shapes.items():
            setattr(self, name, self._upload(np.zeros(shape, dtype)))
        shared = {
            "tape": game.tape(market),
            "table": market.observed,
            "fraction": market.fraction_left,
            "land": market.land,
            "first": market.first,
            "starts": game.starts(market),
            "mirror": market.mirror,
        }
        for name, array in shared.items():
            # A kernel is compiled once more for an array that cannot be written to, as one mapped from a file.
            setattr(self, name, self._upload(np.require(array, requirements="W")))
        self.seed(np.zeros(n, np.int64), np.arange(n))

    def _upload(self, array: np.ndarray) -> object:
        if not self.is_cuda:
            return np.ascontiguousarray(array)
        import torch

        return torch.tensor(np.ascontiguousarray(array), device=self.device)

    def _launch(self, which: int, args: tuple) -> None:
        if not self.is_cuda:
            _cpu_kernels(self.num_envs >= _PARALLEL_FROM)[which](*args)
            return
        import torch
        from numba import cuda
        from numba.core.errors import NumbaPerformanceWarning

        # numba launches on the device that is current.
        with torch.cuda.device(self.count.device):
            stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
            accounts, threads, rows = block_shape(self.num_envs)
            blocks = -(-self.num_envs // accounts)
            args = tuple(cuda.as_cuda_array(a, sync=False) if isinstance(a, torch.Tensor) else a for a in args)
            with warnings.catch_warnings():
                # A small batch is what was asked for.
                warnings.simplefilter("ignore", NumbaPerformanceWarning)
                kernels = _cuda_kernels(
                    self.game.window, self.autoreset, int(self.game.is_shaped), int(self.game.mirror_prob > 0),
                    accounts, rows,
                )  # fmt: skip
                kernels[which][blocks, threads, stream](*args)

    def seed(self, seeds: np.ndarray, numbers: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Key the masked accounts' generators by (seeds[i], numbers[i]), from their first episodes on."""
        mask = self._upload(np.ones(self.num_envs, bool) if mask is None else mask)
        keys = self._upload(np.stack([np.asarray(seeds, np.int64), np.asarray(numbers, np.int64)]))
        self.keys[:, mask] = keys[:, mask]
        self.count[dynamics.EPISODE][mask] = 0

    def reset(self, mask: np.ndarray | None = None, starts: np.ndarray | None = None) -> None:
        """Start the next episode of the masked accounts (all by default), at drawn bars or at `starts`.

        Raises:
            ValueError: a start that is not a bar to decide at, or is the last one; or an account left out that has
                never been reset.
        """
        self._restart(*self.check_reset(mask, starts))

    def check_reset(self, mask: np.ndarray | None, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What `reset` would do, nothing being changed yet: bool [N], and int32 [N], negative where a start is drawn.

        Raises:
            ValueError: as `reset`.
        """
        n = self.num_envs
        mask = np.ones(n, bool) if mask is None else np.asarray(mask, bool)
        given = np.full(n, -1, np.int32)
        if starts is not None:
            starts = np.asarray(starts)
            if starts.shape not in ((), (n,)):
                raise ValueError(f"start has shape {starts.shape}, expected () or ({n},)")
            given[mask] = self.market.check_start(np.broadcast_to(starts, n)[mask])
        # Ages are positive from the first reset on.
        if not mask.all() and (self.count[dynamics.AGE][self._upload(~mask)] == 0).any():
            raise ValueError("the reset leaves out accounts that have never been reset; reset all of them first")
        return mask, given

    def _restart(self, mask: np.ndarray, given: np.ndarray) -> None:
        """Start the masked accounts, at `given` where that is not negative, and write everybody's observation."""
        self._launch(
            1,
            (
                self._upload(mask), self._upload(given), self.tape, self.table, self.fraction, self.land, self.first,
                self.starts, self.mirror, self.keys, self.count, self.money, self.obs, self.game.window,
                float(self.game.mirror_prob), self.rules,
            ),
        )  # fmt: skip

    def place(self, start: object, stop: object) -> None:
        """Put every account flat at bar `start` [N], to play until bar `stop` [N], not mirrored."""
        count, money = self.count, self.money
        count[:] = 0
        money[:] = 0.0
        count[dynamics.BAR] = self._upload(np.asarray(start, np.int32))
        count[dynamics.STOP] = self._upload(np.asarray(stop, np.int32))
        count[dynamics.AGE] = self.rules.free_age
        self.observe()

    def observe(self) -> None:
        """Write `obs` from the accounts as they stand."""
        self._restart(np.zeros(self.num_envs, bool), np.full(self.num_envs, -1, np.int32))

    def step(self, actions: object) -> None:
        """Play one bar with `actions`, int32 [N, 4] on the engine's device, values in [0, 3) (not checked here)."""
        self._launch(
            0,
            (
                self.tape, self.table, self.fraction, self.land, self.first, self.starts, self.mirror, self.keys,
                self.count, self.money, actions, self.obs, self.final_obs, self.reward, self.terms, self.points,
                self.flags, self.game.window, self.game.episode_bars, float(self.game.mirror_prob), self.autoreset,
                self.close_at_stop, self.rules, self.shaping, int(self.game.is_shaped),
            ),
        )  # fmt: skip

    def state_dict(self) -> dict[str, object]:
        """Copies of the arrays that the next step depends on."""
        return {name: copied(getattr(self, name)) for name in ("count", "money", "keys")}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore `state_dict`; the next steps are then those of the saved engine, bit for bit.

        Raises:
            ValueError: an array of another shape.
        """
        for name in ("count", "money", "keys"):
            mine = getattr(self, name)
            if tuple(mine.shape) != tuple(state[name].shape):
                raise ValueError(
                    f"engine state {name} has shape {tuple(state[name].shape)}, expected {tuple(mine.shape)}"
                )
            mine[:] = state[name]
        self.observe()


def _is_cuda(device: str) -> bool:
    """Whether a device is CUDA's.

    Raises:
        ValueError: neither the CPU nor a CUDA device.
        ImportError: a CUDA device without numba-cuda; the target that numba itself brings is another, older one.
    """
    if device == "cpu":
        return False
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, expected 'cpu' or a CUDA device such as 'cuda' or 'cuda:0'")
    if kind == "cuda" and importlib.util.find_spec("numba_cuda") is None:
        raise ImportError(f"device is {device!r}, which needs numba-cuda: pip install fox-es[cuda]")
    return kind == "cuda"


def copied(array: Any) -> Any:
    """A copy of an array of the engine, numpy or torch as it is."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def to_numpy(array: Any) -> np.ndarray:
    """A numpy array of numbers or of a torch tensor on any device."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)
