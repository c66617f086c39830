"""A synthetic target and EAGLE-3 draft with known acceptance, as large as wanted, made on the GPU.

Tokens lie on circles: the embedding of token x is (cos, sin) of ``2 pi k_j x / V`` over many random k_j, plus two
constant coordinates. The target's attention and MLP outputs are zero, so its hidden state is the embedding, and its
head maps token x to its successor: x + 1, or x + 2 for a fixed 15 % of tokens. The draft's MLP rotates the circles by
one token, so it always proposes x + 1 (x + 2 second). A chain draft is therefore right until the first skipped token.
The weights that do not matter are random, so the time is that of the real shape.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

VOCABULARY = 4096
SKIP_SHARE = 0.15

SHAPES = {
    # hidden, layers, intermediate, heads, key-value heads
    "llama3-8b": (4096, 32, 14336, 32, 8),
    "small": (2048, 8, 8192, 16, 8),
}


def skipped_tokens() -> set[int]:
    """Tokens whose successor is two further on."""
    rng = random.Random(7)
    return {token for token in range(VOCABULARY) if rng.random() < SKIP_SHARE}


SKIPPED = skipped_tokens()


def next_token(token: int) -> int:
    """The target's greedy choice after `token`."""
    return (token + (2 if token in SKIPPED else 1)) % VOCABULARY


def prompt(index: int) -> list[int]:
    """Prompt number `index`: 32 tokens."""
    last = (100 + 37 * index) % VOCABULARY
    return [(last - 31 + offset) % VOCABULARY for offset in range(32)]


def expected_tokens(tokens: list[int], count: int) -> list[int]:
    """The target's greedy continuation of a prompt."""
    result: list[int] = []
    token = tokens[-1]
    for _ in range(count):
        token = next_token(token)
        result.append(token)
    return result


def expected_chain_lengths(tokens: list[int], count: int, num_steps: int) -> list[int]:
    """Accept lengths (bonus included) of a chain draft, cycle by cycle, until `count` tokens are out.

    The draft rolls on from the last token whose hidden state it has: it proposes the tokens after the bonus token
    without knowing which was skipped.
    """
    lengths: list[int] = []
    before, bonus = tokens[-1], next_token(tokens[-1])
    produced = 1
    while produced < count:
        current, accepted = bonus, 0
        for step in range(num_steps):
            wanted = next_token(current)
            if (before + 2 + step) % VOCABULARY != wanted:
                break
            current = wanted
            accepted += 1
        lengths.append(accepted + 1)
        produced += accepted + 1
        before, bonus = current, next_token(current)
    return lengths


def build(directory: Path, shape: str) -> None:
    """Write ``target`` and ``draft`` checkpoints of a shape into `directory`."""
    import torch
    from safetensors.torch import save_file

    if (directory / "draft" / "model.safetensors").exists():
        return
    hidden, layers, intermediate, heads, kv_heads = SHAPES[shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(1234)
    bf16 = torch.bfloat16
    pairs = (hidden - 2) // 2
    frequency = torch.randint(1, VOCABULARY, (pairs,), generator=generator, device=device)
    angle = (frequency[None, :] * torch.arange(VOCABULARY, device=device)[:, None] % VOCABULARY).double()
    angle = angle * (2 * math.pi / VOCABULARY)
    circles = torch.zeros(VOCABULARY, hidden, device=device)
    circles[:, 0 : 2 * pairs : 2] = angle.cos().float()
    circles[:, 1 : 2 * pairs : 2] = angle.sin().float()
    embedding = circles.clone()
    embedding[:, 2 * pairs :] = 1.0
    rms = math.sqrt((pairs + 2) / hidden)
    head_dim = hidden // heads

    def noise(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator, device=device) * 0.02).to(bf16).cpu()

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": VOCABULARY - 1,
        "attention_bias": False,
        "mlp_bias": False,
    }
    target = directory / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    head = torch.zeros(VOCABULARY, hidden, device=device)
    head.index_add_(0, torch.tensor([next_token(token) for token in range(VOCABULARY)], device=device), circles)
    head *= 20.0 / (pairs / rms)
    weight_map: dict[str, str] = {}
    total = 0

    def shard(number: int, weights: dict[str, Any]) -> None:
        nonlocal total
        name = f"model-{number:05d}.safetensors"
        save_file(weights, target / name)
        total += sum(weight.numel() * weight.element_size() for weight in weights.values())
        weight_map.update(dict.fromkeys(weights, name))

    shard(
        0,
        {
            "model.embed_tokens.weight": embedding.to(bf16).cpu(),
            "lm_head.weight": head.to(bf16).cpu(),
            "model.norm.weight": torch.ones(hidden, dtype=bf16),
        },
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shard(
            layer + 1,
            {
                prefix + "self_attn.q_proj.weight": noise(heads * head_dim, hidden),
                prefix + "self_attn.k_proj.weight": noise(kv_heads * head_dim, hidden),
                prefix + "self_attn.v_proj.weight": noise(kv_heads * head_dim, hidden),
                prefix + "self_attn.o_proj.weight": torch.zeros(hidden, heads * head_dim, dtype=bf16),
                prefix + "mlp.gate_proj.weight": noise(intermediate, hidden),
                prefix + "mlp.up_proj.weight": noise(intermediate, hidden),
                prefix + "mlp.down_proj.weight": torch.zeros(hidden, intermediate, dtype=bf16),
                prefix + "input_layernorm.weight": torch.ones(hidden, dtype=bf16),
                prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=bf16),
            },
        )
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )

    draft = directory / "draft"
    draft.mkdir(exist_ok=True)
    draft_config = config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
    }
    (draft / "config.json").write_text(json.dumps(draft_config))
    # The MLP adds (R - I) h: R turns every circle by one token.
    step = frequency.double() * (2 * math.pi / VOCABULARY)
    cosine, sine = step.cos().float(), step.sin().float()
    even = torch.arange(pairs, device=device) * 2
    turn = torch.zeros(hidden, hidden, device=device)
    turn[even, even] = cosine - 1
    turn[even, even + 1] = -sine
    turn[even + 1, even] = sine
    turn[even + 1, even + 1] = cosine - 1
    gain = 16.0
    gate = torch.zeros(intermediate, hidden, device=device)
    gate[:, 2 * pairs :] = gain * rms / 2
    up = torch.zeros(intermediate, hidden, device=device)
    rows = torch.arange(hidden, device=device)
    up[rows, rows] = 1.0
    down = torch.zeros(hidden, intermediate, device=device)
    down[:, :hidden] = turn * (rms / gain)
    fuse = torch.zeros(hidden, 3 * hidden, device=device)
    fuse[rows, hidden + rows] = 1.0
    draft_head = (torch.roll(circles, 1, 0) + 0.85 * torch.roll(circles, 2, 0)) * (12.0 / (pairs / rms))

    def draft_noise(size: int) -> Any:
        return torch.randn(size, 2 * hidden, generator=generator, device=device) * 0.02

    weights = {
        "fc.weight": fuse,
        "midlayer.self_attn.q_proj.weight": draft_noise(heads * head_dim),
        "midlayer.self_attn.k_proj.weight": draft_noise(kv_heads * head_dim),
        "midlayer.self_attn.v_proj.weight": draft_noise(kv_heads * head_dim),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, heads * head_dim, device=device),
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": down,
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": draft_head,
    }
    save_file({name: w.to(bf16).cpu().contiguous() for name, w in weights.items()}, draft / "model.safetensors")
