"""vLLM's serving code for OpenAI's API, on an engine that other requests share."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..wire.messages import Serving
from .agent_calls import ROUTES
from .backend import AgentApp, Refused
from .sessions import CALL

MODEL = "policy"  # agents see this name instead of the folder of the engine's files


class ServingClient:
    """Client in the place of vLLM's `AsyncLLM`: serving code can read the engine and generate, but change nothing.

    Args:
        llm (`vllm.AsyncLLM`):
            The engine.
    """

    def __init__(self, llm: Any):
        self._llm = llm
        self.vllm_config = llm.vllm_config
        self.model_config = llm.model_config
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor

    @property
    def errored(self) -> bool:
        return self._llm.errored

    @property
    def dead_error(self) -> BaseException:
        return self._llm.dead_error

    def check_admission(self, *_: Any, **__: Any) -> None:
        """Admit every call: the limits are those of its session."""

    async def is_tracing_enabled(self) -> bool:
        return False

    def generate(
        self, prompt: Mapping[str, Any], sampling_params: Any, *_: Any, **__: Any
    ) -> AsyncIterator[Any]:
        """Generate as for a rank. Of the sampling settings, only what shapes the text counts."""
        from vllm.sampling_params import RequestOutputKind

        text = {
            "detokenize": True,
            "skip_special_tokens": sampling_params.skip_special_tokens,
            "spaces_between_special_tokens": sampling_params.spaces_between_special_tokens,
        }
        # without a stream vLLM asks for the last output only, and no token would count as made before
        if sampling_params.output_kind == RequestOutputKind.DELTA:
            text["output_kind"] = RequestOutputKind.DELTA
        return CALL.get().outputs(prompt["prompt_token_ids"], text)


async def build_agent_app(llm: Any, serving: Serving) -> AgentApp:
    """Build vLLM's app for agents.

    Args:
        llm (`vllm.AsyncLLM`):
            The engine.
        serving ([`Serving`]):
            Names of vLLM's parsers, and what the chat template gets.

    Raises:
        `Refused`: if vLLM does not have a parser.
    """
    # the imports take seconds, in which the engine must go on
    app, args, init_app_state = await asyncio.to_thread(_build, llm, serving)
    await init_app_state(ServingClient(llm), app.state, args, ("generate",))
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) in ROUTES
    ]
    chat = app.state.openai_serving_chat

    async def render(body: Mapping[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(**{**body, "model": MODEL, "add_generation_prompt": False})
        _, prompts = await chat.render_chat_request(request)
        return prompts[0]["prompt_token_ids"]

    return AgentApp(app, MODEL, render, end_tokens(llm))


def _build(llm: Any, serving: Serving) -> tuple[Any, Any, Any]:
    """Return vLLM's app, the arguments of its server, and the function that fills the app's state."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.launchers.launcher import validate_api_server_args
    except ImportError:  # vLLM 0.26
        from vllm.entrypoints.openai.api_server import (
            build_app,
            init_app_state,
            validate_api_server_args,
        )
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = llm.model_config.model
    args.served_model_name = [MODEL]
    args.tool_call_parser = serving.tool_call_parser
    args.enable_auto_tool_choice = serving.tool_call_parser is not None
    args.structured_outputs_config.reasoning_parser = serving.reasoning_parser or ""
    args.default_chat_template_kwargs = dict(serving.chat_template_kwargs)
    args.enable_log_requests = False
    args.disable_log_stats = True
    args.disable_fastapi_docs = True
    args.allowed_origins = []
    try:
        validate_api_server_args(args)
    except KeyError as error:  # it has no such parser, and names those that it has
        raise Refused("EngineRefusedError", f"vLLM: {error.args[0]}") from error
    return build_app(args, ("generate",), llm.model_config), args, init_app_state


def end_tokens(llm: Any) -> frozenset[int]:
    """Return the tokens that end a completion: those of the tokenizer and of the generation config."""
    several = llm.model_config.try_get_generation_config().get("eos_token_id")
    found = several if isinstance(several, list) else [several]
    tokenizer = llm.renderer.tokenizer
    return frozenset({*found, tokenizer.eos_token_id} - {None})
