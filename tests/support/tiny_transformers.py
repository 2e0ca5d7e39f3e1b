"""Folders as `save_pretrained` writes them: tiny models of transformers with random weights. Nothing is downloaded."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

WORDS = ["a", "good", "bad", "film", "very", "not", "the", "of", "was", "is", "it", "and", "in", "Paris", "London"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PLACES = 32
NAMES = ("bad", "fair", "good")
CHAT = "{% for each in messages %}{{ each['content'] }} {% endfor %}"


def transformers() -> Any:
    """The library; the test is skipped without it."""
    return pytest.importorskip("transformers", reason="needs transformers: `make test-ready` installs it")


def save_tokenizer(folder: Path, *, is_causal: bool = False) -> None:
    """A tokenizer of whole words; for encoders with [CLS] and [SEP] around them."""
    tokenizers = importlib.import_module("tokenizers")
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens: dict[str, Any] = {"unk_token": "[UNK]"}
    if is_causal:
        tokens |= {"eos_token": "[SEP]", "chat_template": CHAT}
    else:
        tokens |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=PLACES, **tokens)
    fast.save_pretrained(str(folder))


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": PLACES,
    }


def save_bert(folder: Path, head: str, **config: Any) -> None:
    """A BERT whose class ends in `head`; three classes where it has any. Weights are wide, so that answers differ."""
    library = transformers()
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}
    _save(getattr(library, f"Bert{head}")(library.BertConfig(**{**_sizes(), **labels, **config})), folder)
    save_tokenizer(folder)


def save_llama(folder: Path) -> None:
    """A causal model, without a padding token."""
    library = transformers()
    config = library.LlamaConfig(
        **_sizes(),
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    _save(library.LlamaForCausalLM(config), folder)
    save_tokenizer(folder, is_causal=True)


def save_bart(folder: Path) -> None:
    """A model that reads a text and writes another one."""
    library = transformers()
    sizes = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {f"{half}_ffn_dim": 32 for half in ("encoder", "decoder")}
    config = library.BartConfig(
        **sizes,
        vocab_size=len(SPECIAL) + len(WORDS),
        d_model=16,
        max_position_embeddings=PLACES,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    _save(library.BartForConditionalGeneration(config), folder, seed=12, width=1.0)
    save_tokenizer(folder)


def save_vit(folder: Path) -> None:
    """A model of pictures of 8 by 8 pixels."""
    library = transformers()
    config = library.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    _save(library.ViTForImageClassification(config), folder)
    library.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(str(folder))


def _save(model: Any, folder: Path, *, seed: int = 7, width: float = 0.5) -> None:
    """Write the model with random weights, so wide that answers differ from text to text."""
    torch = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder))
