"""Machine and models of a run: one GPU with real shapes, or a rehearsal of the same code on a CPU with tiny ones."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from trl_multinode.engine.settings import CPU_ENVIRONMENT, CPU_KV_CACHE_BYTES, cores_per_worker

ENTROPY = (
    3.5  # nats per token; at the log V of random weights, log-probs hardly depend on the weights
)
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "tiny": (64, 128, 2, 2, 2, 300, True),
}


@dataclass(frozen=True)
class Machine:
    """Device that the stages run on.

    Args:
        rehearsal (`bool`):
            Run the stages on a CPU with a tiny model in float32. Its figures do not apply to a GPU.
        engine_module (`str`, *optional*):
            Module of the engine process. The default is the library's engine, which freezes requests in stage d.
    """

    rehearsal: bool
    engine_module: str = "trl_multinode.engine_process.main"
    # for the engines, added to the device's own
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda:0")

    def gpu_id(self, index: int = 0) -> str:
        """Return the physical id of a visible GPU, for the engine's CUDA_VISIBLE_DEVICES."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return listed.split(",")[index] if listed else str(index)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if self.rehearsal or name == "fp32" else torch.bfloat16

    def shape(self, name: str) -> str:
        return "tiny" if self.rehearsal else name

    def engine_environment(self, gpus: int = 1) -> dict[str, str]:
        """Return the variables of the engine process, which must find the kit's own modules."""
        here = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        if self.rehearsal:
            return {
                **CPU_ENVIRONMENT,
                **cores_per_worker(gpus),
                "PYTHONPATH": path,
                **self.environment,
            }
        visible = ",".join(self.gpu_id(index) for index in range(gpus))
        return {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path, **self.environment}

    def engine_args(self, dtype: str, eager: bool, share: float = 0.3, **more) -> dict:
        """Return keywords of vLLM's `EngineArgs`; the engine gets `share` of the GPU's memory."""
        args = {
            "dtype": str(self.dtype(dtype)).removeprefix("torch."),
            "seed": 0,
            "max_num_seqs": 64,
        }
        if self.rehearsal:
            return (
                args | {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES} | more
            )
        return args | {"enforce_eager": eager, "gpu_memory_utilization": share} | more


def build_model(
    machine: Machine, shape: str, dtype: str, on: torch.device | None = None
) -> PreTrainedModel:
    """
    Build a Qwen2 with random weights whose next-token entropy is `ENTROPY`.

    The scale of the final norm multiplies all logits, so the entropy falls as the scale grows, and a bisection finds
    the right scale.

    Args:
        shape (`str`):
            A key of `SHAPES`.
        dtype (`str`):
            `"bf16"` or `"fp32"`.
        on (`torch.device`, *optional*):
            Device of the weights. Default: the machine's device.
    """
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[machine.shape(shape)]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
        max_position_embeddings=40960, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with on or machine.device:
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype(dtype)).eval()
    low, high = 1.0, 64.0
    for _ in range(12):
        middle = (low + high) / 2
        model.model.norm.weight.data.fill_(middle)
        low, high = (middle, high) if entropy(model) > ENTROPY else (low, middle)
    return model


@torch.no_grad()
def entropy(model: PreTrainedModel) -> float:
    """Return the mean entropy of the next token over a fixed random sequence, in nats."""
    tokens = torch.randint(
        2, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)
    )
    logprobs = model(tokens.to(model.device)).logits[0].float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).mean().item()


@torch.no_grad()
def perturb(model: PreTrainedModel, relative: float = 0.2) -> None:
    """Mix noise into every weight, so that stale weights show in the log-probs.

    The noise has `relative` times the tensor's standard deviation, and the sum is scaled back to that deviation, so
    that the entropy stays as set even after twenty calls. Constant tensors (norms, biases of zero) do not change.
    """
    for parameter in model.parameters():
        spread = parameter.float().std(correction=0).item()
        if spread > 0:
            parameter.add_(torch.randn_like(parameter), alpha=relative * spread).div_(
                (1 + relative**2) ** 0.5
            )


def synchronize(machine: Machine) -> None:
    if not machine.rehearsal:
        torch.cuda.synchronize()
