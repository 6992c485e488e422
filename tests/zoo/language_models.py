"""Tiny language models and tokenizers with random weights, saved as the real ones are."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.captioners_for_tests import REFERENCES

PROMPT = "a photo of"


TEXTS = [*(caption for captions in REFERENCES for caption in captions), PROMPT]


TEXTS += ["a man ' s dog , sitting . they don t run"]


def bert_tokenizer() -> Any:
    """WordPiece over the words of the test captions, with BERT's special tokens."""
    words = dict.fromkeys(word for text in TEXTS for word in text.split())
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)})


def byte_tokenizer(bos: str, eos: str, pad: str | None, starts: bool) -> Any:
    """Byte-level BPE trained on the test captions; ``starts`` puts BOS before every
    text, as OPT does.
    """
    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator(
        [*TEXTS, *(f" {text}" for text in TEXTS)],
        330,
        min_frequency=0,
        show_progress=False,
        special_tokens=list(dict.fromkeys(filter(None, (bos, pad, eos)))),
    )
    backend = learnt._tokenizer
    if starts or pad:
        template = f"{bos} $A" if starts else f"{bos} $A {eos}"
        backend.post_processor = TemplateProcessing(
            single=template,
            special_tokens=[
                (token, backend.token_to_id(token)) for token in (bos, eos)
            ],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        unk_token=eos,
        **({"pad_token": pad} if pad else {}),
    )


def tiny_gpt2(folder: Path, positions: int = 48) -> Path:
    """Save a GPT-2 of random weights with byte-level BPE; return its folder."""
    tokenizer = byte_tokenizer("<|endoftext|>", "<|endoftext|>", None, starts=False)
    shape = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": positions,
        "initializer_range": 0.5,
    }
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **shape
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_regressor(folder: Path, labels: int = 1, **options: Any) -> Path:
    """Save a RoBERTa of random weights for sequence classification, as the released
    ICC; return its folder.
    """
    tokenizer = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    ids = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=34,
        num_labels=labels,
        initializer_range=0.5,
        problem_type="regression",
        **ids,
        **shape,
        **options,
    )
    model = RobertaForSequenceClassification(config)
    torch.nn.init.constant_(
        model.classifier.out_proj.bias, -1.2
    )  # logits on both ends of [0, 1]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_llama_regressor(folder: Path) -> Path:
    """Save a Llama of random weights for sequence classification with one label; return its folder.

    As of many decoders, its configuration does not say which token pads.
    """
    tokenizer = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **shape
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
