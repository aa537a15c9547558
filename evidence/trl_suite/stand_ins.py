"""Small local stand-ins for the hub's models and data that TRL's tests name, built without a network.

A stand-in is the folder `trl-internal-testing/NAME` below the folder from which the tests run. transformers and
datasets both take a relative path that exists before they ask the hub, so neither is patched.
"""

import codecs
import contextlib
import io
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

OTHER_MODELS = {"Qwen/Qwen2.5-0.5B-Instruct": "Qwen2ForCausalLM"}  # which TRL's tests of vLLM train
LARGEST_STAND_IN = (
    30_000_000  # parameters; more means that a config has sizes that the table below does not know
)

# Ids that TRL's tests write down: Qwen's tokens of the tool calls that they let the model "generate"
PIECES = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 497: '",', 522: "</", 606: "name", 788: '":',
    894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n",
    14172: "tool", 16370: "arguments", 17453: "Done", 22785: "ply_tool", 35744: "increment", 64648: "multi",
    93054: "_multi", 95642: '"}}\n',
}  # fmt: skip
FIRST_SPECIAL = 151643  # Qwen's
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
ADDED = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
LEARNED = 4096  # tokens of bytes and of merges
# One id in so many of the rest is a word, the others decode to nothing. A tokenizer is loaded several times per test,
# which took most of a test's time with a word for each id. Three completions of 8 random tokens lack words in 4 %.
WORD_EVERY = 8
PAD, EOS = FIRST_SPECIAL, FIRST_SPECIAL + 2
VOCABULARY = FIRST_SPECIAL + len(SPECIAL) + len(ADDED)

# Sizes by the names that configs use. A config gets those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": 32,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "max_position_embeddings": 32768,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3, "mamba_num_heads": 8,
        "mamba_head_dim": 4, "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 16, "use_mamba_kernels": False,
    },
    "Cohere2": {"logit_scale": 1.0},
}  # fmt: skip
TEMPLATES = {"Qwen3": "qwen3.jinja"}  # beginning of a class -> TRL's copy of its chat template
# of each line of `import this`
WORDS_OF_PROMPTS = (
    4,
    2,
    3,
    1,
    4,
    3,
    1,
    4,
    3,
    3,
    2,
    6,
    6,
    11,
    2,
    4,
    7,
    5,
    5,
)
REMOTE_CODE = {
    "configuration_remote.py": "from transformers import LlamaConfig\n\n\n"
    'class RemoteConfig(LlamaConfig):\n    model_type = "remote"\n',
    "modeling_remote.py": "from transformers import LlamaForCausalLM\n\nfrom .configuration_remote import "
    "RemoteConfig\n\n\nclass RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n",
}


def build(
    ids: Iterable[str], folder: Path, head_dim: int, prompts: int, texts: tuple[str, ...]
) -> dict[str, str]:
    """
    Build the stand-ins of `ids` in `folder`, and return the reason for each that cannot be built.

    Args:
        head_dim (`int`):
            Size of an attention head. vLLM's CPU attention needs 32 or more.
        prompts (`int`):
            Number of training prompts. TRL's tests train on all of them for three epochs.
        texts (`tuple[str, ...]`):
            Texts whose words become single tokens, besides TRL's chat templates.
    """
    missing = {}
    for name in sorted(ids):
        try:
            if name.endswith("/zen"):
                save_prompts(folder / name, prompts)
            else:
                save_model(name, folder / name, head_dim, texts)
        # a class that this transformers lacks, or a config with other names
        except Exception as error:
            missing[name] = f"no stand-in for {name}: {' '.join(str(error).split())[:120]}"
    return missing


# ---- models


def save_model(name: str, folder: Path, head_dim: int, texts: tuple[str, ...]) -> None:
    """Save model and tokenizer of a hub's model such as `trl-internal-testing/tiny-Qwen2ForCausalLM-2.5`."""
    named = OTHER_MODELS.get(name) or next(
        iter(re.findall(r"/(?:tiny|small)-(\w+For(?:Causal|Seq)\w+)", name)), None
    )
    if named is None:
        raise LookupError("only causal language models and sequence classifiers are built")
    architecture = named.replace("Remote", "Llama")
    small_model(getattr(transformers, architecture), head_dim).to(torch.bfloat16).save_pretrained(
        folder
    )
    template = next(
        (file for prefix, file in TEMPLATES.items() if architecture.startswith(prefix)),
        "qwen2_5.jinja",
    )
    tokenizer = qwen_tokenizer(texts)
    tokenizer.chat_template = (
        resources.files("trl").joinpath("chat_templates", template).read_text()
    )
    tokenizer.save_pretrained(folder)
    if architecture != named:
        add_remote_code(folder)


def small_model(cls: type[PreTrainedModel], head_dim: int) -> PreTrainedModel:
    """Build a random model of a class of transformers; matrices are as large as a trained model's are."""
    own = next(
        (sizes for prefix, sizes in OWN_SIZES.items() if cls.__name__.startswith(prefix)), {}
    )
    known = vars(cls.config_class()) | dict.fromkeys(getattr(cls.config_class, "attribute_map", ()))
    # as few as possible, because a vocabulary of 151,669 takes most of the time
    heads = 4 if head_dim < 32 else 2
    sizes = SIZES | {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    sizes |= {"hidden_size": heads * head_dim, "head_dim": head_dim}
    config = cls.config_class(**{key: value for key, value in sizes.items() if key in known} | own)
    config.num_labels = 1
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    if parameters > LARGEST_STAND_IN:
        raise ValueError(
            f"{cls.__name__} has {parameters} parameters with the sizes of {Path(__file__).name}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
    return model


def add_remote_code(folder: Path) -> None:
    """Turn a saved Llama into a model whose classes come with it (`trust_remote_code=True`)."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file, source in REMOTE_CODE.items():
        (folder / file).write_text(source)


@cache
def qwen_tokenizer(texts: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """
    Build a tokenizer with Qwen's ids for the bytes, the special tokens and the tokens in TRL's tests.

    It learns the words of `texts` and of TRL's chat templates, because a prompt with tools of one token per byte has
    four times the tokens. One id in eight of the rest decodes to a word of its own, so that random completions differ.
    """
    letters = bytes_to_letters()
    learned, merges = learned_tokens([*chat_templates(), *texts])
    ids = {letters[byte]: index for index, byte in enumerate(qwens_order(letters))}
    ids |= {
        "".join(letters[byte] for byte in text.encode()): index for index, text in PIECES.items()
    }
    free = (index for index in range(256, FIRST_SPECIAL) if index not in PIECES)
    ids |= {token: next(free) for token in learned if token not in ids}
    ids |= {letters[ord(" ")] + f"w{index}": index for index in free if index % WORD_EVERY == 0}
    ids |= {token: FIRST_SPECIAL + index for index, token in enumerate([*SPECIAL, *ADDED])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )


def learned_tokens(texts: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens and the merges of a byte-level tokenizer trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [
        tuple(merge) for merge in model["merges"]
    ]


def chat_templates() -> list[str]:
    """Return the source of TRL's chat templates."""
    return [
        path.read_text()
        for path in resources.files("trl").joinpath("chat_templates").iterdir()
        if path.is_file()
    ]


def bytes_to_letters() -> dict[int, str]:
    """Return the printable letter with which byte-level tokenizers write each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }


def qwens_order(letters: dict[int, str]) -> list[int]:
    """Return the bytes in the order of their ids in GPT-2's and Qwen's vocabulary."""
    return sorted(letters, key=lambda byte: letters[byte])


# ---- data


def save_prompts(folder: Path, number: int) -> None:
    """Save the first `number` of the 17 training prompts of `trl-internal-testing/zen`, and its 2 test prompts."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    prompts = [
        " ".join(line.split()[:words]) for line, words in zip(lines, WORDS_OF_PROMPTS, strict=True)
    ]
    card = ["---", "configs:"]
    for config in ("standard_prompt_only", "conversational_prompt_only"):
        (folder / config).mkdir(parents=True)
        card += [f"- config_name: {config}", "  data_files:"]
        for split, texts in {"train": prompts[:-2][:number], "test": prompts[-2:]}.items():
            chats = [[{"role": "user", "content": text}] for text in texts]
            rows = Dataset.from_dict({"prompt": texts if config.startswith("standard") else chats})
            rows.to_parquet(folder / config / f"{split}.parquet")
            card += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
