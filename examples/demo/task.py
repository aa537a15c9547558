"""The demo's task: symbols in, the successors of the last one out. Checked by rule, made on the spot, no hub.

    prompt "c a j e" -> answer "f g"      (alphabet a..j, a follows j)

The last symbol of a prompt is its key, the ones before it are noise. Whoever always gives the same answer is right in
one position of ten.
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
NUM_NOISE = 3  # 10^4 possible prompts, so that thousands are left over to be held out
ANSWER_LENGTH = 2
PAD, EOS = "<pad>", "<eos>"


def answer(prompt: str) -> list[str]:
    """The `ANSWER_LENGTH` symbols that follow the prompt's key."""
    key = SYMBOLS.index(prompt.split()[-1])
    return [SYMBOLS[(key + 1 + i) % len(SYMBOLS)] for i in range(ANSWER_LENGTH)]


def score(completion: str, expected: list[str]) -> float:
    """Share of the positions that are right, 0 to 1."""
    given = completion.split()
    return sum(given[i : i + 1] == [symbol] for i, symbol in enumerate(expected)) / len(expected)


def successor_reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    """Reward function in TRL's form."""
    return [score(completion, answer(prompt)) for prompt, completion in zip(prompts, completions, strict=True)]


def best_constant_score(dataset: Dataset) -> float:
    """Mean reward of the one answer that does best when it is given to every prompt."""
    expected = [answer(prompt) for prompt in dataset["prompt"]]
    constants = map(" ".join, itertools.product(SYMBOLS, repeat=ANSWER_LENGTH))
    return max(sum(score(constant, right) for right in expected) / len(expected) for constant in constants)


def make_datasets(num_train: int, num_held_out: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Training and held-out prompts, all different from each other.

    Args:
        num_train (`int`), num_held_out (`int`):
            Number of prompts.
        seed (`int`, *optional*, defaults to `0`):
            Of the choice.
    """
    everything = list(itertools.product(SYMBOLS, repeat=NUM_NOISE + 1))
    chosen = random.Random(seed).sample(everything, num_train + num_held_out)
    prompts = [" ".join(symbols) for symbols in chosen]
    return Dataset.from_dict({"prompt": prompts[:num_train]}), Dataset.from_dict({"prompt": prompts[num_train:]})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per symbol: a vocabulary of 12."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *SYMBOLS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def make_model(seed: int) -> PreTrainedModel:
    """A random Qwen2 of 84 thousand parameters; the same on every rank.

    Args:
        seed (`int`):
            Of its weights.
    """
    hidden = 64
    config = Qwen2Config(
        vocab_size=len(SYMBOLS) + 2,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,  # head_dim 32 is the least that vLLM's attention takes on a CPU
        num_key_value_heads=hidden // 32,
        max_position_embeddings=64,
        initializer_range=0.04,  # twice the default: a model this small finds its first right answers sooner
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
