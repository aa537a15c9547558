"""Agents that call an engine over HTTP get what its ranks get; one set of tests on the fake engine and on vLLM."""

import asyncio
import functools
import http.client
import itertools
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import httpx
import openai
import pytest
from listening import listeners
from swapping import slowed
from waiting import HANG_S, until

from multinode_kit.engines import (
    FAKE,
    FORKED,
    SyncDriver,
    connected_again,
    running_engines,
)
from multinode_kit.faults import Faults
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine_process.agent_calls import ReplyMessage
from trl_multinode.engine_process.backend import AgentApp
from trl_multinode.engine_process.sessions import AgentSession, digests, why_forks
from trl_multinode.errors import EngineRefusedError
from trl_multinode.wire.messages import (
    Await,
    CloseSession,
    Completions,
    Drain,
    Generate,
    OpenSession,
    Serving,
    unpack_floats,
    unpack_ids,
)

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOS = 1
USER = {"role": "user", "content": "Count to three."}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PARSERS = Serving(tool_call_parser="hermes")
ON_BOTH = [FAKE, pytest.param(FORKED, id="vllm", marks=pytest.mark.engine)]


@pytest.fixture(scope="module")
def driver_of(tmp_path_factory):
    """Function that starts an engine of a kind when a test first needs it."""
    with ExitStack() as ends:

        @functools.cache
        def driver_of(module: str) -> SyncDriver:
            model = tiny_qwen2(258)
            tokenizer = tiny_tokenizer()
            tokenizer.chat_template = TEMPLATE
            slow = {"logits_processors": ["multinode_kit.logits_processor:SlowTokens"]}
            engine = Faults().slow_tokens(0.002).engine(FAKE) if module == FAKE else module
            engines = ends.enter_context(running_engines(
                model, tmp_path_factory.mktemp("log"), engine, max_model_len=1024, processing_class=tokenizer,
                **({} if module == FAKE else slow),
            ))  # fmt: skip
            driver = SyncDriver(model, engines)
            driver.send()
            return driver

        yield driver_of


@pytest.fixture(params=ON_BOTH)
def trainer(request, driver_of):
    return driver_of(request.param)


class Agent:
    """An open session, and OpenAI's own client of it."""

    def __init__(self, trainer: SyncDriver, client, **changes):
        settings = {"max_calls": 20, "max_tokens": 12, "sampling": SAMPLING, "seed": 7}
        settings |= {"min_update": trainer.version.update, "serving": PARSERS} | changes
        self.key = secrets.token_hex(32)
        self.rank = client
        self.endpoint = client.ask(OpenSession(key=self.key, **settings))
        self.url = f"http://127.0.0.1:{self.endpoint.port}/v1"
        self.openai = openai.OpenAI(
            base_url=self.url, api_key=self.key, max_retries=0, timeout=HANG_S
        )

    def chat(self, *messages, **settings):
        return self.openai.chat.completions.create(model="any", messages=list(messages), **settings)

    def post(self, body, path="/chat/completions", **headers) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=sent | headers, timeout=HANG_S)

    def close(self):
        return self.rank.ask(CloseSession(key=self.key))


@pytest.fixture
def agent_of(trainer):
    """Function that opens a session on a connection of its own."""
    with ExitStack() as ends:

        def agent_of(**changes) -> Agent:
            rank = connected_again(trainer.engines)
            ends.callback(rank.close)
            agent = Agent(trainer, rank[0], **changes)
            ends.callback(agent.openai.close)
            return agent

        yield agent_of


@contextmanager
def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function)


def ids(call) -> list[int]:
    return unpack_ids(call.prompt).tolist()


def sampled(call) -> list[int]:
    return unpack_ids(call.completion.tokens).tolist()


def seed_of(call) -> int:
    """Seed of the first call with its prompt in a session."""
    opened = OpenSession(key="", max_calls=1, max_tokens=1, sampling={}, seed=7)
    return AgentSession(opened, None).seed(call.prompt)


def rendered(*messages) -> list[int]:
    text = "".join(f"{m['role']}: {m['content']}<eos>\n" for m in messages) + "assistant: "
    return tiny_tokenizer()(text)["input_ids"]


def status(trainer):
    return trainer.engines[0].ask(Await(min_update=0))


# ---- what a call computes and records


def test_a_call_has_the_ids_and_the_logprobs_that_a_rank_gets(trainer, agent_of):
    agent = agent_of()
    made = status(trainer).tokens
    reply = agent.chat(USER, temperature=0.1, seed=3, max_tokens=9)
    record = agent.close()
    (call,) = record.calls
    assert ids(call) == rendered(USER)
    request = Generate(
        prompt=call.prompt, num_completions=1, max_tokens=9, sampling=SAMPLING,
        seed=seed_of(call), min_update=trainer.version.update,
    )  # fmt: skip
    answer = trainer.engines[0].ask(request)
    assert isinstance(answer, Completions)
    assert answer.rows == (call.completion,)
    assert reply.usage.prompt_tokens == len(ids(call))
    assert reply.usage.completion_tokens == len(sampled(call))
    assert reply.choices[0].message.content == tiny_tokenizer().decode(
        sampled(call), skip_special_tokens=True
    )
    assert record.overridden == ("seed", "temperature")
    assert status(trainer).tokens == made + 2 * len(sampled(call))
    assert (record.num_refused, record.num_cancelled) == (0, 0)


def test_a_completion_takes_text_or_ids_and_both_are_recorded(agent_of):
    agent = agent_of()
    text = agent.openai.completions.create(model="any", prompt="one, two", max_tokens=5)
    agent.openai.completions.create(model="any", prompt=[5, 6, 7], logprobs=0)
    first, second = agent.close().calls
    assert ids(first) == tiny_tokenizer()("one, two")["input_ids"] and len(sampled(first)) <= 5
    assert ids(second) == [5, 6, 7]
    assert text.choices[0].text is not None


def test_a_limit_of_tokens_beyond_the_context_is_cut(agent_of):
    """The context has 1024 tokens, and agents ask for round numbers."""
    agent = agent_of()
    prompt = [5] * 1020
    agent.openai.completions.create(model="any", prompt=prompt, max_tokens=4000)
    agent.chat(USER, max_completion_tokens=4000)
    agent.chat(USER, max_completion_tokens=3, max_tokens=2, stream=True).close()
    long, full, *_ = agent.close().calls
    assert 0 < len(sampled(long)) <= 4 < len(sampled(full)) <= 12


def test_models_lists_the_name_of_the_endpoint(agent_of):
    agent = agent_of()
    assert [model.id for model in agent.openai.models.list()] == [agent.endpoint.model]


def test_a_stream_has_the_text_of_the_recorded_tokens(agent_of):
    agent = agent_of(max_tokens=40)
    chunks = list(agent.chat(USER, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    (call,) = agent.close().calls
    assert text == tiny_tokenizer().decode(sampled(call), skip_special_tokens=True)
    assert len(unpack_floats(call.completion.logprobs)) == len(sampled(call))


def test_seeds_depend_on_the_prompt_and_not_on_the_order_of_calls(agent_of):
    prompts = [[5, 6, 7], [9, 8, 7, 6], [5, 6, 7]]

    def rows(order):
        agent = agent_of()
        for index in order:
            agent.openai.completions.create(model="any", prompt=prompts[index])
        return sorted((ids(call), sampled(call)) for call in agent.close().calls)

    assert rows([0, 1, 2]) == rows([1, 0, 2])
    first, again, _ = rows([0, 1, 2])
    assert first[0] == again[0] and first[1] != again[1]


# ---- ids of messages that come back


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_comes_back_has_its_recorded_ids(agent_of, stream):
    agent = agent_of()
    assert agent.endpoint.forks_because == ""
    messages = [USER]
    for turn in range(3):
        # agents ask for a round number, whatever is left of the context
        reply = agent.chat(*messages, stream=stream, max_tokens=4000)
        if stream:
            content = "".join(c.choices[0].delta.content or "" for c in reply if c.choices)
        else:
            content = reply.choices[0].message.content
        # some agents send text as parts
        parts = [{"type": "text", "text": content}]
        messages.append({"role": "assistant", "content": parts if turn else content})
        messages.append({"role": "user", "content": f"Again, {turn}."})
    calls = agent.close().calls
    assert [call.replaced for call in calls] == [0, 1, 2]
    for before, after in itertools.pairwise(calls):
        row = [*ids(before), *sampled(before)]
        assert ids(after)[: len(row)] == row
    # random bytes are no UTF-8, so the text of the reply has other tokens
    end = [] if sampled(calls[0])[-1] == EOS else [EOS]
    glue = [*end, *tiny_tokenizer()("\nuser: Again, 0.<eos>\nassistant: ")["input_ids"]]
    assert ids(calls[1]) == [*ids(calls[0]), *sampled(calls[0]), *glue]


def test_a_changed_reply_is_rendered_as_it_comes(agent_of):
    agent = agent_of()
    agent.chat(USER)
    other = {"role": "assistant", "content": "one"}
    agent.chat(USER, other, USER)
    _, call = agent.close().calls
    assert call.replaced == 0 and ids(call) == rendered(USER, other, USER)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def tool_call(arguments: str, **more) -> dict:
    return {"id": "a1", "function": {"name": "add", "arguments": arguments}, **more}


def test_a_call_may_offer_tools(agent_of):
    agent = agent_of()
    agent.chat(USER, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    (call,) = agent.close().calls
    assert ids(call) == rendered(USER)


def test_a_reply_is_the_same_in_all_forms_that_agents_send():
    ours = {"role": "assistant", "content": None, "tool_calls": [tool_call('{"a": 1, "b": 2}')]}
    theirs = {
        "role": "assistant", "content": "", "reasoning": "so", "refusal": None,
        "tool_calls": [tool_call('{"b":2,"a":1}')],
    }  # fmt: skip
    other = ours | {"tool_calls": [tool_call('{"a": 1, "b": 3}')]}
    bodies = [{"messages": [USER, reply], "tools": [TOOL]} for reply in (ours, theirs, other)]
    first, second, third = map(digests, bodies)
    assert first == second and first[0] == third[0] and first[1] != third[1]
    assert digests(bodies[0] | {"tools": []})[0] != first[0]


def test_arguments_of_many_brackets_are_compared_as_text():
    """As of a model that repeats one token."""
    message = {"role": "assistant", "tool_calls": [tool_call("[" * 100_000)]}
    assert digests({"messages": [message]}) != digests({"messages": [USER]})


def test_a_stream_whose_first_tool_call_is_the_second_has_no_message():
    delta = {"role": "assistant", "tool_calls": [tool_call("", index=1)]}
    assert ReplyMessage().add(event_of(delta)) is None


def test_the_message_of_a_stream_is_put_together():
    found = ReplyMessage()
    deltas = [
        {"role": "assistant", "content": ""},
        {"content": "I "},
        {"content": "add.", "tool_calls": [tool_call("", index=0)]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for delta in deltas:
        assert found.add(event_of(delta)) is None
    # a network cuts where it likes, and usage and end may come with the last delta
    last = event_of({}, "tool_calls") + b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    assert found.add(b": a comment\n\n" + last[:30]) is None
    reply = found.add(last[30:])
    expected = {"role": "assistant", "content": "I add.", "tool_calls": [tool_call('{"a": 1}')]}
    assert digests({"messages": [reply]}) == digests({"messages": [expected]})


def event_of(delta: dict, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"id": "call", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    return b"data: " + json.dumps(chunk | {"choices": [choice]}).encode() + b"\n\n"


def shortens(messages: list) -> list[int]:
    """Ids of a template that leaves out what earlier replies thought."""
    return [7, EOS] * (len(messages) - 1) + [7, 7, EOS]


@pytest.mark.parametrize(
    ("template", "forks"),
    [
        (lambda messages: [7, EOS] * len(messages), False),
        (shortens, True),
        (lambda messages: [7] * len(messages), True),
        (lambda messages: 1 / 0, True),
    ],
    ids=["plain", "shortens", "no-end", "fails"],
)
def test_the_reason_why_a_template_forks(template, forks):
    async def render(body):
        return template(body["messages"])

    app = AgentApp(None, "policy", render, frozenset({EOS}))
    assert bool(asyncio.run(why_forks(app))) is forks


# ---- what is refused

CHAT = {"messages": [USER]}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
REFUSED = {
    "no JSON": (b"{", 400),
    "no object": ([1], 400),
    "no messages": ({}, 400),
    "several completions": (CHAT | {"n": 2}, 400),
    "a bias": (CHAT | {"logit_bias": {"5": 1.0}}, 400),
    "a stop string": (CHAT | {"stop": ["."]}, 400),
    "a schema": (CHAT | {"response_format": {"type": "json_object"}}, 400),
    "a grammar": (CHAT | {"structured_outputs": {"regex": "a"}}, 400),
    "a choice of words": (CHAT | {"guided_choice": ["a"]}, 400),
    "a forced tool": (CHAT | {"tool_choice": "required"}, 400),
    "other tokens' log-probs": (CHAT | {"logprobs": True, "top_logprobs": 5}, 400),
    "no end": (CHAT | {"ignore_eos": True}, 400),
    "no reply": (CHAT | {"add_generation_prompt": False}, 400),
    "unknown": (CHAT | {"nothing": 1}, 400),
    "no token": (CHAT | {"max_tokens": 0}, 400),
    "half a token": (CHAT | {"max_completion_tokens": 1.5}, 400),
    "many brackets": (b"[" * 100_000, 400),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
    "too long": ({"messages": [{"role": "user", "content": "a" * 2000}]}, 400),
    "too long, as a stream": (
        {"messages": [{"role": "user", "content": "a" * 2000}], "stream": True}, 400,
    ),
    "too large": (b" " * (16 * 2**20 + 1), 413),
}  # fmt: skip


def test_a_call_for_anything_else_is_refused_and_counted(agent_of):
    agent = agent_of(max_calls=100)
    found = {name: agent.post(body) for name, (body, _) in REFUSED.items()}
    expected = {name: code for name, (_, code) in REFUSED.items()}
    assert {name: response.status_code for name, response in found.items()} == expected
    for response in found.values():
        assert response.json()["error"]["message"]
    prompts = [["a", "b"], [[5], [6]], "", [-1, 5], [10**12]]
    assert {agent.post({"prompt": each}, "/completions").status_code for each in prompts} == {400}
    paths = ("/tokenize", "/../invocations", "/responses", "/models/../load_lora_adapter")
    assert {agent.post(CHAT, path).status_code for path in paths} == {404}
    assert agent.post(CHAT, "/models").status_code == 405
    record = agent.close()
    assert record.calls == () and record.num_refused == len(REFUSED) + len(prompts) + 5


def test_settings_that_change_nothing_are_accepted_and_what_is_refused_is_no_call(agent_of):
    agent = agent_of(max_calls=1)
    assert agent.post(CHAT | {"n": 2}).status_code == 400
    neutral = {"n": 1, "stop": None, "logit_bias": {}, "response_format": {"type": "text"}}
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False, "tool_choice": "none"}
    response = agent.post(CHAT | neutral | ignored | {"top_p": 0.1, "top_k": 3})
    assert response.status_code == 200, response.text
    assert agent.close().overridden == ("top_k", "top_p")


def test_only_the_key_of_an_open_session_opens_anything(agent_of):
    agent = agent_of()
    assert agent.post(CHAT, authorization="Bearer wrong").status_code == 401
    assert httpx.get(f"{agent.url}/models", timeout=HANG_S).status_code == 401
    assert httpx.post(f"{agent.url}/x", timeout=HANG_S).status_code == 401
    agent.close()
    with pytest.raises(openai.AuthenticationError):
        agent.chat(USER)
    with pytest.raises(EngineRefusedError):
        agent.close()


def test_calls_above_the_limit_are_refused(agent_of):
    agent = agent_of(max_calls=2)
    agent.chat(USER)
    agent.chat(USER)
    with pytest.raises(openai.PermissionDeniedError):
        agent.chat(USER)
    record = agent.close()
    assert len(record.calls) == 2 and record.num_refused == 1


def test_sessions_share_what_the_endpoint_serves(agent_of):
    agent_of()
    with pytest.raises(EngineRefusedError, match="hermes"):
        agent_of(serving=Serving(tool_call_parser="mistral"))


def test_it_listens_on_the_loopback_address_only(trainer, agent_of):
    agent_of()
    assert set(listeners(trainer.engines[0].ready.pid)) == {"127.0.0.1"}


# ---- calls under way


def long_agent(trainer, agent_of, **changes) -> Agent:
    sampling = SAMPLING | {"ignore_eos": True} | slowed(trainer, 0.01)
    return agent_of(max_tokens=400, sampling=sampling, **changes)


def until_it_makes_tokens(trainer) -> None:
    made = status(trainer).tokens
    until(lambda: status(trainer).tokens > made, "a token of the call")


def until_it_is_idle(trainer) -> None:
    """Wait until no call is open and no token is made: that which was under way is still counted."""

    def is_idle() -> bool:
        one, other = status(trainer), status(trainer)
        same = one.tokens == other.tokens and one.times.busy_s == other.times.busy_s
        return same and one.num_open == 0

    until(is_idle, "the end of the call")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_leaves_cancels_its_call(trainer, agent_of, stream):
    agent = long_agent(trainer, agent_of)
    with closing(http.client.HTTPConnection("127.0.0.1", agent.endpoint.port)) as connection:
        headers = {"authorization": f"Bearer {agent.key}"}
        body = json.dumps(CHAT | {"stream": stream})
        connection.request("POST", "/v1/chat/completions", body, headers)
        until_it_makes_tokens(trainer)
    until_it_is_idle(trainer)
    record = agent.close()
    assert (record.calls, record.num_cancelled, record.num_refused) == ((), 1, 0)


def test_the_end_of_a_session_cancels_its_calls(trainer, agent_of):
    agent = long_agent(trainer, agent_of)
    with in_thread(lambda: agent.post(CHAT)) as call:
        until_it_makes_tokens(trainer)
        record = agent.close()
        assert call.result(HANG_S).status_code == 503
    until_it_is_idle(trainer)
    assert (record.calls, record.num_cancelled) == ((), 1)


def test_the_end_of_a_rank_ends_its_sessions(trainer, agent_of):
    agent = long_agent(trainer, agent_of)
    with in_thread(lambda: agent.post(CHAT)) as call:
        until_it_makes_tokens(trainer)
        agent.rank.close()
        assert call.result(HANG_S).status_code == 503
    until_it_is_idle(trainer)
    assert agent.post(CHAT).status_code == 401


def test_a_call_waits_for_the_weights_of_its_session(trainer, agent_of):
    agent = agent_of(min_update=trainer.version.update + 1)
    with in_thread(lambda: agent.chat(USER)) as call:
        until(lambda: status(trainer).num_open == 1, "the call")
        version = trainer.send()
        call.result(HANG_S)
    (recorded,) = agent.close().calls
    assert {span.update for span in recorded.completion.versions} == {version.update}


def test_an_update_in_flight_freezes_a_call_and_its_spans_show_it(trainer, agent_of):
    agent = long_agent(trainer, agent_of)
    first = trainer.version.update
    trainer.sync.in_flight = True
    try:
        with in_thread(lambda: agent.chat(USER)) as call:
            until_it_makes_tokens(trainer)
            trainer.send()
            call.result(HANG_S)
    finally:
        trainer.sync.in_flight = False
    (recorded,) = agent.close().calls
    assert [span.update for span in recorded.completion.versions] == [first, first + 1]
    assert recorded.completion.versions[-1].end == len(sampled(recorded)) == 400


def test_calls_at_once_are_all_recorded(agent_of):
    agent = agent_of()
    with ThreadPoolExecutor(8) as pool:
        prompts = [[5, 6, 7 + index] for index in range(8)]
        list(pool.map(lambda p: agent.openai.completions.create(model="m", prompt=p), prompts))
    assert sorted(ids(call) for call in agent.close().calls) == prompts


# ---- last, because the engine is of no use afterwards


def test_a_failed_update_gives_an_error_and_no_tokens(trainer, agent_of):
    agent = long_agent(trainer, agent_of)
    trainer.sync.in_flight = True
    with in_thread(lambda: agent.post(CHAT)) as call:
        until_it_makes_tokens(trainer)
        with pytest.raises(Exception, match="The sender gave the update up"):
            trainer.send_part(1)
        assert call.result(HANG_S).status_code == 500
    assert agent.post(CHAT | {"stream": True}).status_code == 500
    trainer.sync.in_flight = False
    trainer.send()
    assert agent.close().calls == ()


def test_an_engine_that_leaves_takes_no_calls(trainer, agent_of):
    agent = agent_of()
    trainer.engines[0].ask(Drain())
    for stream in (False, True):
        assert agent.post(CHAT | {"stream": stream}).status_code == 503
    assert agent.close().calls == ()
