"""Train Fox's agent and test it on data it has not seen.

    python examples/train_dqn.py                                     # the embedded market, about two minutes
    python examples/train_dqn.py --data BARS --tz America/Chicago --train-end 2020-01-01 --valid-end 2021-01-01

`--help` lists the options; `fox train` is the same command.
"""

import fox_env
from fox_agent import Trainer
from fox_agent.cli import Run, compare, console, fit, load_data, run_command, split_data, training_command


def train(run: Run) -> None:
    profile = run.profile

    # A market is bars, features and sessions. Its parts are whole sessions in time order, and the features are
    # normalized by what the training part looked like.
    market = load_data(profile)
    train_part, valid_part, test_part = split_data(market, profile)

    # The validation part chooses the best epoch and decides whether there is an edge at all: without one, the agent
    # that comes back stays flat.
    trainer = Trainer(profile, train_part, valid_part, out=run.out, device=run.device)
    result = fit(trainer, run.resume)
    console.print(result.verdict, soft_wrap=True)

    # One pass through the test part, every cost in it, beside simple policies that it has to beat. If the agent was
    # rejected, the report also shows what it would have made, as "candidate".
    report = fox_env.evaluate(
        result.agent, test_part, seed=profile.train.seed, others=result.agent.rejected, **profile.game.settings()
    )
    report.print()
    report.save(run.out / "report.json")
    compare(report)
    console.print(f"saved in {run.out}", soft_wrap=True)


if __name__ == "__main__":
    run_command(training_command(train))
