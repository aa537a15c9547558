"""Program of [`MiniSweAgent`](agent_packages.py), in an environment with mini-swe-agent: mini_swe_program.py MODEL.

It prints the agent's result. Address and key of the endpoint are in the environment.
"""

import json
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

MOST_STEPS = 4

agent = DefaultAgent(
    LitellmModel(model_name=f"openai/{sys.argv[1]}"),
    LocalEnvironment(),
    system_template="Use bash.",
    instance_template="{{task}}",
    step_limit=MOST_STEPS,
)
print(json.dumps(agent.run("Finish.")))
