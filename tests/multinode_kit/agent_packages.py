"""Agents of other packages, unmodified, as harnesses of a trainer; and what a model must say to play with them.

```python
tokenizer = tool_tokenizer(*SMOLAGENTS_TURNS)
GRPOTrainer(tool_model(tokenizer=tokenizer), harness=Harness(smolagents_agent, tool_call_parser="hermes"), ...)
```
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_multinode.sessions.harness import Session

MINI_SWE_AGENT = "mini-swe-agent==2.4.6"
INSTALL_LIMIT_S = 600.0
PROGRAM = Path(__file__).with_name("mini_swe_program.py")
MOST_STEPS = 4


def hermes_call(name: str, **arguments: Any) -> str:
    """Return a call of a tool in the text that vLLM's parser `hermes` finds, with other blanks than the template's."""
    call = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{call}</tool_call>"


# a turn that goes on, and one that ends the agent
SMOLAGENTS_TURNS = (hermes_call("add", a=1, b=2), hermes_call("final_answer", answer="3"))
MINI_SWE_AGENT_TURNS = (
    hermes_call("bash", command="echo on"),
    hermes_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)


async def smolagents_agent(session: Session) -> float:
    """Run smolagents' `ToolCallingAgent` in a thread of this process. It returns 1 if the agent has answered."""
    return await asyncio.to_thread(run_smolagents, session)


def run_smolagents(session: Session) -> float:
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES
    from smolagents.models import REMOVE_PARAMETER

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIModel(
        session.model,
        api_base=session.base_url,
        api_key=session.api_key,
        # the endpoint refuses stop words and "required", which smolagents sends by default
        stop=REMOVE_PARAMETER,
        tool_choice="auto",
    )
    agent = ToolCallingAgent(
        [add],
        model,
        # its own prompt has 5,000 characters, each a token of the tiny model
        prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use the tools."},
        max_steps=MOST_STEPS,
        verbosity_level=LogLevel.OFF,
    )
    return float(agent.run("1 + 2?") == "3")


class MiniSweAgent:
    """Harness that runs mini-swe-agent's `DefaultAgent` in a process of its own environment.

    Args:
        python (`Path`):
            Python of an environment from [`install_mini_swe_agent`].
    """

    def __init__(self, python: Path):
        self.python = python

    async def __call__(self, session: Session) -> float:
        """Return 1 if the agent has submitted its work."""
        process = await asyncio.create_subprocess_exec(
            # isolated: not with the variables and folders of the Python that trains
            *(self.python, "-I", PROGRAM, session.model),
            cwd=session.folder,
            env=session.environment | self.settings(session.folder),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"mini-swe-agent ended with code {process.returncode}")
        return float(json.loads(output.splitlines()[-1])["exit_status"] == "Submitted")

    @staticmethod
    def settings(folder: Path) -> dict[str, str]:
        """Return variables with which it reads and writes nothing outside of the session's folder."""
        return {
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
            "MSWEA_COST_TRACKING": "ignore_errors",
            # else it repeats a refused call ten times, a minute apart
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            # else litellm downloads a table of prices
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


def install_mini_swe_agent(folder: Path, environment: Mapping[str, str]) -> Path:
    """Make an environment with mini-swe-agent, which needs other versions than this one, and return its Python.

    Args:
        folder (`Path`):
            Folder of the environment, half a gigabyte.
        environment (`Mapping[str, str]`):
            Variables of uv, with the package index.

    Raises:
        `subprocess.CalledProcessError`: if the package cannot be installed; `stderr` has the reason.
    """
    python = folder / "bin" / "python"
    for command in (
        ["uv", "venv", "--quiet", "--python", sys.executable, str(folder)],
        # pip takes 90 s of a core for it, uv 4 s
        ["uv", "pip", "install", "--quiet", "--python", str(python), MINI_SWE_AGENT],
    ):
        subprocess.run(
            command,
            env=dict(environment),
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    return python
