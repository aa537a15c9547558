"""Task of the demo: name the successors of the last symbol. Prompts are made here and answers checked by rule; no hub.

    prompt "c a j e" -> answer "f g"      (alphabet a..j, a follows j)

The last symbol of a prompt is its key, the ones before it are noise. A constant answer is right in one position of
ten.
"""

import itertools
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

SYMBOLS = "abcdefghij"
NUM_NOISE = 3  # 10^4 possible prompts, so thousands remain for the held-out set
ANSWER_LENGTH = 2
PAD, EOS = "<pad>", "<eos>"
EOS_ID = 1


def answer(prompt: str) -> list[str]:
    """Return the `ANSWER_LENGTH` symbols that follow the prompt's key."""
    key = SYMBOLS.index(prompt.split()[-1])
    return [SYMBOLS[(key + 1 + i) % len(SYMBOLS)] for i in range(ANSWER_LENGTH)]


def score(completion: str, expected: list[str]) -> float:
    """Return the share of positions that are right, 0 to 1."""
    given = completion.split()
    return sum(given[i : i + 1] == [symbol] for i, symbol in enumerate(expected)) / len(expected)


def successor_reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    """Score completions, as a reward function of TRL."""
    return [
        score(completion, answer(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def ended_reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_
) -> list[float]:
    """Score completions that go on after the answer; one that did not end scores 0."""
    scores = successor_reward(prompts, completions)
    return [score * (ids[-1] == EOS_ID) for score, ids in zip(scores, completion_ids, strict=True)]


def best_constant_score(dataset: Dataset) -> float:
    """Return the highest mean reward of a single answer that is given to every prompt."""
    expected = [answer(prompt) for prompt in dataset["prompt"]]
    constants = map(" ".join, itertools.product(SYMBOLS, repeat=ANSWER_LENGTH))
    return max(
        sum(score(constant, right) for right in expected) / len(expected) for constant in constants
    )


def make_datasets(num_train: int, num_held_out: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Make training and held-out prompts, all different from each other.

    Args:
        num_train (`int`), num_held_out (`int`):
            Number of prompts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the choice.
    """
    everything = list(itertools.product(SYMBOLS, repeat=NUM_NOISE + 1))
    chosen = random.Random(seed).sample(everything, num_train + num_held_out)
    prompts = [" ".join(symbols) for symbols in chosen]
    return Dataset.from_dict({"prompt": prompts[:num_train]}), Dataset.from_dict(
        {"prompt": prompts[num_train:]}
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per symbol and a vocabulary of 12."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *SYMBOLS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def make_model(seed: int) -> PreTrainedModel:
    """Build a random Qwen2 of 84 thousand parameters, the same on every rank.

    Args:
        seed (`int`):
            Seed of the weights.
    """
    hidden = 64
    config = Qwen2Config(
        vocab_size=len(SYMBOLS) + 2,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,  # head_dim 32 is the smallest for vLLM's CPU attention
        num_key_value_heads=hidden // 32,
        max_position_embeddings=128,
        initializer_range=0.04,  # twice the default: a model this small finds its first right answers sooner
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
