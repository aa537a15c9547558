"""GRPO of an agent that owns its loop: a program that talks to a server. Run this on every node, K = 0 to 3:

    accelerate launch --config_file accelerate_configs/4node.yaml --machine_rank K --main_process_ip HOST0 \
        examples/harness.py --model_name_or_path Qwen/Qwen3-4B --max_completion_length 512 --micro_batch_tokens 16384 \
        --vllm_max_model_length 16384 --max_staleness 1 --vllm_importance_sampling_mode token_truncate \
        --vllm_importance_sampling_clip_max 2 --output_dir outputs/harness

The game is that of `agent.py`. Here the loop of turns is in `harness_agent.py`, a program that imports `openai` and
nothing of training. `hunt` prepares its folder, starts it against the engine of this node, and scores its result; each
call of the model is recorded and trained. `docs/use/agents.md` says how calls become rows, and has a run of
`make demo MODE=harness`: this trainer on two nodes of one machine, without a GPU.
"""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent import COLORS, QUESTION, TreasureHunt, make_datasets

from trl_multinode import GRPOConfig, GRPOTrainer, Harness, ModelConfig, Session, TrlParser

AGENT = Path(__file__).with_name("harness_agent.py")


def write_task(folder: Path, path: list[str]) -> None:
    """Write the question and what is in each box, which is all that the agent gets."""
    hunt = TreasureHunt()
    (folder / "task.txt").write_text(QUESTION + hunt.reset(path))
    (folder / "boxes").mkdir()
    for color in COLORS:
        (folder / "boxes" / f"{color}.txt").write_text(hunt.open_box(color))


async def start_agent(session: Session) -> None:
    """Run the agent in a process of its own, which ends with the session."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        AGENT,
        session.model,
        cwd=session.folder,
        # with OPENAI_BASE_URL and OPENAI_API_KEY
        env=session.environment,
    )
    try:
        code = await process.wait()
    finally:
        # cancelled: the time of the session is up, or the run ends
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise RuntimeError(f"The agent in {session.folder} ended with code {code}.")


def reward_of(result: dict, path: list[str]) -> float:
    """Return a quarter for each note that was read, and a half for the right answer, as in `agent.py`."""
    hunt = TreasureHunt()
    hunt.reset(path)
    for color in set(result["opened"]) & set(COLORS):
        hunt.open_box(color)
    named = set(re.findall(r"\w+", result["answer"].lower())) & set(COLORS)
    return hunt.get_reward() + 0.5 * (named == {path[-1]})


async def hunt(
    session: Session, run_agent: Callable[[Session], Awaitable[None]] = start_agent
) -> float:
    """Let the agent play one hunt, and return its reward."""
    path = session.row["path"]
    write_task(session.folder, path)
    await run_agent(session)
    return reward_of(json.loads((session.folder / "result.json").read_text()), path)


def make_trainer(
    config: GRPOConfig, model: Any, harness: Any = hunt, **keywords: Any
) -> GRPOTrainer:
    """Return the trainer of the hunts; `keywords` are further ones of [`GRPOTrainer`]."""
    train_set, held_out = make_datasets()
    return GRPOTrainer(
        model=model,
        # the parser that finds the calls of tools in the text of the model; Qwen's models write those of hermes
        harness=Harness(harness, session_timeout=120.0, max_calls=8, tool_call_parser="hermes"),
        args=config,
        train_dataset=train_set,
        eval_dataset=held_out,
        **keywords,
    )


def main() -> None:
    config, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = make_trainer(config, model_args.model_name_or_path)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
