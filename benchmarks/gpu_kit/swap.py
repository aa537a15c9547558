"""Stage d: a whole update arrives while requests are frozen."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from . import rows as comparing
from .bench import STALE_FACTOR, Bench
from .machine import perturb
from .record import require

TOKENS = 1500
ROWS_LIMIT_S = 180.0


def swap_in_flight(found: Bench, figures: dict) -> None:
    """Run stage d: send a whole update while requests are frozen; each token must fit the weights that sampled it."""
    asked = comparing.prompts(found.model.config.vocab_size, 2)
    other = found.engines.connect_again()
    found.trainer.sync.in_flight = found.trainer.sync.recompute_kv = True
    try:
        with ThreadPoolExecutor(1) as thread:
            update = found.trainer.version.update
            future = thread.submit(comparing.sample, other, asked, 2, TOKENS, update, seeded=False)
            time.sleep(1.0)
            old = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
            perturb(found.model)
            start = time.perf_counter()
            require(not future.done(), "the rows ended before the swap: nothing was frozen")
            found.trainer.send()
            figures["swap_s"] = time.perf_counter() - start
            got = future.result(ROWS_LIMIT_S)
    finally:
        found.trainer.sync.in_flight = found.trainer.sync.recompute_kv = False
        other.close()
    judge_swap(found, figures, got, old)


def judge_swap(found: Bench, figures: dict, got: comparing.Rows, old: dict) -> None:
    """Find each row's cut and compare both parts with the weights that must have sampled them."""
    after = comparing.trainer_logprobs(found.model, got, batch=2)
    new = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    found.model.load_state_dict(old)
    before = comparing.trainer_logprobs(found.model, got, batch=2)
    limit, _ = found.limit(got[:1])
    found.model.load_state_dict(new)
    engine = comparing.engine_logprobs(got)
    cuts = comparing.swap_points(before, after, engine)
    left = torch.cat([(engine - before)[i, :cut] for i, cut in enumerate(cuts)]).abs().mean().item()
    right = torch.cat([(engine - after)[i, cut:] for i, cut in enumerate(cuts)]).abs().mean().item()
    wrong = min((engine - before).abs().mean().item(), (engine - after).abs().mean().item())
    figures |= {"tokens_before_swap": cuts, "before": left, "after": right, "without_a_swap": wrong}
    require(all(0 < cut < engine.shape[1] for cut in cuts), f"no row was cut in two: {cuts}")
    require(
        left <= limit and right <= limit,
        f"tokens differ by {left:.2g} before and {right:.2g} after the swap",
    )
    require(
        wrong >= STALE_FACTOR * max(left, right),
        "one set of weights explains the rows as well as two",
    )
