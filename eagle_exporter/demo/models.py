"""Builds the demo's model pair: a Llama target and its EAGLE-3 draft, about 5 MB, with known answers.

Both are ordinary checkpoints that SGLang loads as ``LlamaForCausalLM`` and ``LlamaForCausalLMEagle3``. Their
weights are written down, not trained:

* A hidden vector of 128 values has two halves. The *token half* holds the one-hot vector of the last token.
  The *answer half* holds what a model says about the next one; the output head reads this half only.
* Attention is alive: queries and keys encode the token's identity, so that a position attends to itself and
  to equal tokens, and the value is the one-hot vector of that token. A wrong KV slot gives a wrong answer.
* Target: layer 0 copies the token through attention into the answer half; the other layers attend and add
  nothing; the head maps each token to ``answers.next_token``.
* Draft: attention writes the token into the token half; the MLP erases what the previous step left behind and
  writes the logits of ``answers.draft_distribution`` into the answer half. So every draft step, also on a
  branch of a tree, depends on its own token.

Run them in float32: the shape of a draft tree hangs on score differences below the precision of bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_exporter.demo import answers

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = 1
"""Raise it with every change of the weights below that the tables of :mod:`answers` do not show."""

_VOCABULARY = answers.VOCABULARY_SIZE
_HIDDEN = 2 * _VOCABULARY  # token half, answer half
_INTERMEDIATE = 2 * _VOCABULARY
_HEADS = 2  # one per rank with tensor parallel 2
_HEAD_DIM = 32
_NORM_EPSILON = 1e-5
# SGLang's default layers for EAGLE-3 features are 2, n // 2 and n - 3 (LlamaForCausalLM
# .set_eagle3_layers_to_capture): with eight layers all differ and follow layer 0.
_TARGET_LAYERS = 8

# Rotary embedding turns dimension pair (i, i + 16) by position * theta ** (-i / 16). With this theta the
# pairs from 8 on turn by less than 0.1 rad over the whole context: only those carry token identity.
_ROPE_THETA = 1e10
_IDENTITY_DIMENSIONS = (8, 24)  # first dimension of each octal digit of the token
# Attention logit of a position to itself; any other token gets at most about half of it.
_SELF_ATTENTION_LOGIT = 160.0
_TARGET_LOGIT = 10.0
_GATE = 20.0  # silu(20) = 20 to eight digits: a gate that is simply open


@dataclass(frozen=True)
class ModelPair:
    """Directories of the two checkpoints."""

    target: Path
    draft: Path


def build_pair(directory: Path) -> ModelPair:
    """Build the pair in ``directory`` unless it is already there, and return where it is.

    The directory appears whole or not at all (built beside it, then renamed); a pair of another version is
    replaced. Two processes may build at the same time.

    Raises:
        ModuleNotFoundError: torch or safetensors are missing and the pair has to be built.
        OSError: the directory cannot be written.

    """
    pair = ModelPair(directory / "target", directory / "draft")
    fingerprint = _fingerprint()
    if _built_fingerprint(directory) == fingerprint:
        return pair

    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        _write_checkpoint(temporary / "target", _target_config(), _target_weights())
        _write_checkpoint(temporary / "draft", _draft_config(), _draft_weights())
        (temporary / "pair.json").write_text(json.dumps({"fingerprint": fingerprint}) + "\n")
        if directory.exists() and _built_fingerprint(directory) != fingerprint:
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
            os.rename(directory, old / directory.name)
            shutil.rmtree(old, ignore_errors=True)
        try:
            os.rename(temporary, directory)
        except OSError:
            if _built_fingerprint(directory) != fingerprint:  # not merely overtaken by another builder
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return pair


def _built_fingerprint(directory: Path) -> str | None:
    try:
        manifest = json.loads((directory / "pair.json").read_text())
    except (OSError, ValueError):
        return None
    fingerprint = manifest.get("fingerprint") if isinstance(manifest, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


def _fingerprint() -> str:
    tables = [[answers.next_token(t), answers.draft_distribution(t)] for t in range(_VOCABULARY)]
    content = json.dumps([_FORMAT, _target_config(), _draft_config(), tables], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _base_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": answers.CONTEXT_LENGTH,
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": _ROPE_THETA,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": answers.BEGIN_TOKEN,
        "eos_token_id": answers.END_TOKEN,
        "tie_word_embeddings": False,
    }


def _target_config() -> dict[str, Any]:
    return _base_config() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": _TARGET_LAYERS}


def _draft_config() -> dict[str, Any]:
    return _base_config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _VOCABULARY,
    }


def _write_checkpoint(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def _normalisation(squared_length: float) -> float:
    """What RMSNorm multiplies a hidden vector of this squared length by."""
    return 1.0 / math.sqrt(squared_length / _HIDDEN + _NORM_EPSILON)


def _attention(prefix: str, inputs: int, token_gain: float, output_half: int | None) -> dict[str, Tensor]:
    """Self-attention by token identity.

    ``inputs`` is the width of the layer's input, whose first 64 values are the one-hot token times
    ``token_gain``. The output is that one-hot vector in half ``output_half`` (0 or 1), or nothing for None.
    """
    import torch

    # Both octal digits match for the token itself: twice the square of this, over sqrt(head_dim).
    identity = math.sqrt(_SELF_ATTENTION_LOGIT / 2.0 * math.sqrt(_HEAD_DIM)) / token_gain
    query = torch.zeros(_HEADS * _HEAD_DIM, inputs)
    value = torch.zeros(_HEADS * _HEAD_DIM, inputs)
    output = torch.zeros(_HIDDEN, _HEADS * _HEAD_DIM)
    for token in range(_VOCABULARY):
        for head in range(_HEADS):
            for first, digit in zip(_IDENTITY_DIMENSIONS, divmod(token, 8), strict=True):
                query[head * _HEAD_DIM + first + digit, token] = identity
        # The one-hot vector of 64 values is split over the two heads of 32.
        value[token, token] = 1.0 / token_gain
        if output_half is not None:
            output[output_half * _VOCABULARY + token, token] = 1.0
    return {
        f"{prefix}.self_attn.q_proj.weight": query,
        f"{prefix}.self_attn.k_proj.weight": query.clone(),
        f"{prefix}.self_attn.v_proj.weight": value,
        f"{prefix}.self_attn.o_proj.weight": output,
    }


def _target_weights() -> dict[str, Tensor]:
    import torch

    embedding = torch.zeros(_VOCABULARY, _HIDDEN)
    embedding[:, :_VOCABULARY] = torch.eye(_VOCABULARY)
    # After layer 0 a hidden vector has a one in each half.
    head = torch.zeros(_VOCABULARY, _HIDDEN)
    for token in range(_VOCABULARY):
        head[answers.next_token(token), _VOCABULARY + token] = _TARGET_LOGIT / _normalisation(2.0)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(_TARGET_LAYERS):
        prefix = f"model.layers.{layer}"
        gain = _normalisation(1.0 if layer == 0 else 2.0)
        weights |= _attention(prefix, _HIDDEN, gain, 1 if layer == 0 else None)
        weights |= {
            f"{prefix}.mlp.gate_proj.weight": torch.eye(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": torch.eye(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": torch.zeros(_HIDDEN, _INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
    return weights


def _draft_logits() -> tuple[list[list[float]], float]:
    """Logits by last token, each row shifted so that all have the same length, and that length.

    Softmax ignores the shift; the draft's layer relies on the length, see :func:`_draft_weights`.
    """
    rows = []
    for token in range(_VOCABULARY):
        row = [0.0] * _VOCABULARY
        for candidate, probability in answers.draft_distribution(token):
            row[candidate] = math.log(probability)
        mean = math.fsum(row) / _VOCABULARY
        rows.append([value - mean for value in row])
    squared_lengths = [math.fsum(value * value for value in row) for row in rows]
    squared_length = max(squared_lengths)
    shifted = [
        [value + math.sqrt((squared_length - own) / _VOCABULARY) for value in row]
        for row, own in zip(rows, squared_lengths, strict=True)
    ]
    return shifted, math.sqrt(squared_length)


def _draft_weights() -> dict[str, Tensor]:
    import torch

    logits, length = _draft_logits()

    # The first draft step gets the target's features (three hidden vectors); it must find in the answer half
    # a vector as long as those that later steps leave there. Its content is erased, so any will do.
    feature = torch.zeros(_HIDDEN, 3 * _HIDDEN)
    for token in range(_VOCABULARY):
        feature[_VOCABULARY + answers.next_token(token), token] = length

    # Before the MLP: the token's one (from attention) and the old answer, so the norm's factor is known.
    factor = _normalisation(1.0 + length * length)
    gate = torch.zeros(_INTERMEDIATE, _HIDDEN)
    up = torch.zeros(_INTERMEDIATE, _HIDDEN)
    down = torch.zeros(_HIDDEN, _INTERMEDIATE)
    for unit in range(_VOCABULARY):
        # Units 0 to 63, one per token: open for this token; write its logits, erase the token.
        gate[unit, unit] = _GATE / factor
        up[unit, unit] = 1.0 / (factor * _GATE)
        down[_VOCABULARY:, unit] = torch.tensor(logits[unit])
        down[unit, unit] = -1.0
        # Units 64 to 127, one per answer value: always open (some token is there); erase the old answer.
        gate[_VOCABULARY + unit, :_VOCABULARY] = _GATE / factor
        up[_VOCABULARY + unit, _VOCABULARY + unit] = 1.0 / (factor * _GATE)
        down[_VOCABULARY + unit, _VOCABULARY + unit] = -1.0

    head = torch.zeros(_VOCABULARY, _HIDDEN)
    head[:, _VOCABULARY:] = torch.eye(_VOCABULARY) / _normalisation(length * length)
    embedding = torch.zeros(_VOCABULARY, _HIDDEN)
    embedding[:, :_VOCABULARY] = torch.eye(_VOCABULARY)
    return {
        "embed_tokens.weight": embedding,  # SGLang replaces it by the target's, which is the same
        "fc.weight": feature,
        "norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
        # Draft vocabulary = target vocabulary: SGLang adds d2t to the draft token id.
        "d2t": torch.zeros(_VOCABULARY, dtype=torch.int64),
        "t2d": torch.ones(_VOCABULARY, dtype=torch.bool),
        # The layer's input is the normalised token embedding followed by the normalised hidden vector.
        **_attention("midlayer", 2 * _HIDDEN, _normalisation(1.0), 0),
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": down,
        "midlayer.hidden_norm.weight": torch.ones(_HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(_HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(_HIDDEN),
    }
