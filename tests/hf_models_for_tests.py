"""Tiny models of Transformers with random weights, saved and loaded as real ones are: folder in,
captioner out.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    GenerationConfig,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    GPT2Config,
    GPT2LMHeadModel,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    InstructBlipProcessor,
    LlamaConfig,
    LlamaForSequenceClassification,
    OPTConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
)

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.tokens import caption_mask
from rl_caption.runtime.engines import dropout_off
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import REFERENCES

SIDE = 16
SIZE = {"height": SIDE, "width": SIDE}
PROMPT = "a photo of"
ENCODER_DECODERS = ("blip", "vit_gpt2", "vit_bert", "florence2")
PLAIN_PROMPTS = ("git", "blip2", "instructblip")
FAMILIES = (*ENCODER_DECODERS, *PLAIN_PROMPTS)
TEXTS = [*(caption for captions in REFERENCES for caption in captions), PROMPT]
TEXTS += ["a man ' s dog , sitting . they don t run"]
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.5,  # BLIP's own 1e-10 would leave a random model blind
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
Q_FORMER = {**TEXT, "hidden_size": 20, "intermediate_size": 32, "vocab_size": 64}


def bert_tokenizer() -> Any:
    """WordPiece over the words of the test captions, with BERT's special tokens."""
    words = dict.fromkeys(word for text in TEXTS for word in text.split())
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)})


def byte_tokenizer(bos: str, eos: str, pad: str | None, starts: bool) -> Any:
    """Byte-level BPE trained on the test captions; ``starts`` puts BOS before every text, as OPT
    does.
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
    """Save a RoBERTa of random weights for sequence classification, as the released ICC; return its
    folder.
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


def save_blip(folder: Path) -> None:
    """As Salesforce/blip-image-captioning-base: two tokens beyond BERT's vocabulary, EOS is [SEP]."""
    tokenizer = bert_tokenizer()
    size = len(tokenizer)
    text = {
        **TEXT,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.1,
    }
    text |= {
        "vocab_size": size + 2,
        "bos_token_id": size,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    text["sep_token_id"] = tokenizer.sep_token_id
    config = BlipConfig(
        text_config=text,
        vision_config=VISION,
        label_smoothing=0.1,
        initializer_range=0.3,
    )
    BlipForConditionalGeneration(config).save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size=SIZE), tokenizer).save_pretrained(folder)


def save_git(folder: Path) -> None:
    """As microsoft/git-base-coco: the image as a prefix, [CLS] and [SEP]."""
    tokenizer = bert_tokenizer()
    config = GitConfig(
        **TEXT,
        vision_config={**VISION, "num_channels": 3},
        vocab_size=len(tokenizer),
        intermediate_size=48,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    GitForCausalLM(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIZE)
    GitProcessor(images, tokenizer).save_pretrained(folder)


def save_vit_gpt2(folder: Path) -> None:
    """As nlpconnect/vit-gpt2-image-captioning: one token starts, ends and pads; widths differ."""
    end = "<|endoftext|>"
    tokenizer = byte_tokenizer(end, end, None, starts=False)
    decoder = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    save_pair(folder, decoder, tokenizer, start=0, eos=0, pad=0)


def save_vit_bert(folder: Path) -> None:
    """A BERT decoder: [CLS] starts, [SEP] ends, [PAD] pads."""
    tokenizer = bert_tokenizer()
    decoder = BertConfig(
        **TEXT,
        vocab_size=len(tokenizer),
        intermediate_size=48,
        max_position_embeddings=32,
        add_cross_attention=True,
        is_decoder=True,
    )
    save_pair(
        folder, decoder, tokenizer, tokenizer.cls_token_id, tokenizer.sep_token_id, 0
    )


def save_pair(
    folder: Path, decoder: Any, tokenizer: Any, start: int, eos: int, pad: int
) -> None:
    encoder = ViTConfig(**VISION)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = (
        start,
        eos,
        pad,
    )
    VisionEncoderDecoderModel(config).save_pretrained(folder)
    ViTImageProcessor(size=SIZE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_blip2(folder: Path) -> None:
    """As Salesforce/blip2-opt-2.7b: </s> starts, a line break ends, <image> tokens stand for the
    queries.
    """
    tokenizer = byte_tokenizer("</s>", "</s>", "<pad>", starts=True)
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    processor = Blip2Processor(
        BlipImageProcessor(size=SIZE), tokenizer, num_query_tokens=3
    )
    config = Blip2Config(
        vision_config=VISION,
        qformer_config=Q_FORMER,
        text_config=OPTConfig(
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=40,
            init_std=0.3,
            vocab_size=len(tokenizer)
            + 5,  # OPT's output layer is wider than its vocabulary
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=newline,
            pad_token_id=tokenizer.pad_token_id,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    save_with_queries(Blip2ForConditionalGeneration(config), folder)
    processor.save_pretrained(folder)


def save_instructblip(folder: Path) -> None:
    """As Salesforce/instructblip-vicuna-7b, on Llama: the configuration's EOS does not fit the
    tokenizer.
    """
    tokenizer = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    images = BlipImageProcessor(size=SIZE)
    processor = InstructBlipProcessor(
        images, tokenizer, bert_tokenizer(), num_query_tokens=3
    )
    config = InstructBlipConfig(
        vision_config=VISION,
        qformer_config=Q_FORMER,
        text_config=LlamaConfig(
            **TEXT,
            intermediate_size=48,
            vocab_size=len(tokenizer) + 5,
            max_position_embeddings=40,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=9,
            pad_token_id=tokenizer.pad_token_id,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    save_with_queries(InstructBlipForConditionalGeneration(config), folder)
    processor.save_pretrained(folder)


def save_florence2(folder: Path) -> None:
    """As florence-community/Florence-2-base: DaViT, BART; ``generate`` forces <s> after </s>."""
    plain = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    words = plain.backend_tokenizer
    words.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, extra_special_tokens={"image_token": "<image>"}, **names
    )
    images = CLIPImageProcessor(size=SIZE, crop_size=SIZE)
    images.image_seq_length = 5
    ids = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    text = {
        "model_type": "bart",
        "vocab_size": len(tokenizer),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "init_std": 0.3,
        "decoder_start_token_id": ids["eos_token_id"],
        "forced_bos_token_id": ids["bos_token_id"],
        **ids,
    }
    vision = {
        "depths": [1, 1],
        "patch_size": [3, 3],
        "patch_stride": [4, 2],
        "patch_padding": [1, 1],
    }
    vision |= {
        "patch_prenorm": [False, True],
        "embed_dim": [8, 16],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
    }
    vision |= {
        "window_size": 2,
        "drop_path_rate": 0.0,
        "projection_dim": 32,
        "initializer_range": 0.3,
    }
    config = Florence2Config(
        text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id
    )
    model = Florence2ForConditionalGeneration(config)
    model.generation_config.update(
        decoder_start_token_id=ids["eos_token_id"],
        forced_bos_token_id=ids["bos_token_id"],
        no_repeat_ngram_size=3,
    )
    model.save_pretrained(folder)
    Florence2Processor(images, tokenizer).save_pretrained(folder)


def save_with_queries(model: Any, folder: Path) -> None:
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(folder)


def save_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write the family's tiny model to ``folder``, also that of a vision-language model; returns
    it.
    """
    if family not in FAMILIES:
        from tests.zoo.families import save_vlm

        return save_vlm(family, folder, seed)
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    globals()[f"save_{family}"](folder)
    return folder


def put_on_hub(
    name: str, model: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache stands for the hub: it is what a name resolves to once the files are there."""
    cache = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, cache / "snapshots" / "0123abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def tiny_hf_captioner(
    family: str, folder: Path, prompt: str = "", seed: int = 0
) -> HuggingFaceCaptioner:
    """The family's tiny model, saved and loaded, without dropout."""
    captioner = HuggingFaceCaptioner.from_pretrained(
        save_model(family, folder, seed), prompt=prompt
    )
    captioner.policy.eval()
    return captioner


def assert_close_gradients(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-4
) -> None:
    """Relative to each parameter's gradient; a bias of keys has none but for rounding."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * max(
            value.abs().max(), 1e-2 * largest
        ), name


def with_template(folder: Path, template: str) -> str:
    """The folder of a language model whose tokenizer has this chat template from now on."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def gradients(policy):
    found = {
        name: p.grad.clone()
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    policy.zero_grad()
    return found


def assert_recomputing_changes_nothing(
    captioner: Any, inputs: dict[str, Any], ids: torch.Tensor, share: float
) -> None:
    """Captions, scores and gradients are those without dropout, in training with recomputed
    activations, too, of which at most ``share`` of the tensors are kept; whatever the model's
    generation settings.
    """
    plain = copy.deepcopy(captioner)
    plain.policy.zero_grad()
    plain.adapt(frozen=[], lora=None, checkpointed=False)
    saving = copy.deepcopy(plain)
    saving.adapt(frozen=[], lora=None, checkpointed=True)
    saving = copy.deepcopy(saving)  # as the reference policy is
    assert plain.policy.state_dict().keys() == saving.policy.state_dict().keys()
    noise = sampling_noise(1, 0, ["a", "b", "c"], 2, 6)
    decoding = Decoding(num_samples=2, with_greedy=True, max_new_tokens=6)

    def measured(one: Any) -> tuple[Any, Any, Any, int]:
        kept: list[int] = []
        samples = one.generate(one.policy, inputs, decoding, noise)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ):
            logits = one.token_logits(one.policy, inputs, ids)
            loss = token_logprobs(logits, ids).sum()
        loss.backward()
        return samples, logits.detach(), gradients(one.policy), len(kept)

    expected = measured(plain)
    for changed in (plain, saving):
        for module in changed.policy.train().modules():
            if hasattr(module, "attention_dropout") and not isinstance(
                module.attention_dropout, torch.nn.Module
            ):
                module.attention_dropout = 0.5
        changed.policy.model.generation_config = GenerationConfig(
            suppress_tokens=expected[0].flatten().tolist(),
            repetition_penalty=9.0,
            max_length=2,
            no_repeat_ngram_size=1,
        )
        with dropout_off(changed.policy):
            found = measured(changed)
        assert torch.equal(found[0], expected[0])
        assert torch.allclose(found[1], expected[1], atol=1e-4)
        assert_close_gradients(found[2], expected[2], 1e-3)
        with torch.no_grad():
            logits = changed.token_logits(changed.policy, inputs, ids)
        assert not torch.allclose(logits, expected[1], atol=1e-2), "dropout"
    assert found[3] < expected[3] * share, "the layers' activations are not kept"


def assert_texts_survive(captioner: Any) -> list[list[int]]:
    """Encoded texts end with EOS and are decoded to themselves; returns them."""
    texts = ["a small dog", "two squares\non a  green field"]
    encoded = captioner.encode(texts, 40)
    end = captioner.eos_token_id
    assert all(ids[-1] == end and end not in ids[:-1] for ids in encoded)
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in encoded],
        batch_first=True,
        padding_value=captioner.pad_token_id,
    )
    assert captioner.decode(padded) == ["a small dog", "two squares on a green field"]
    assert captioner.encode(texts[:1], 2) == [encoded[0][:2]]
    return encoded


def assert_draws_and_scores(
    captioner: Any,
    given: dict[str, Any],
    noise: torch.Tensor,
    expected: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Two samples at temperature 1.3 are ``expected``, and teacher forcing gives their ``scores``."""
    policy = captioner.policy
    decoding = Decoding(
        num_samples=2, with_greedy=True, temperature=1.3, max_new_tokens=noise.shape[-1]
    )
    tokens = captioner.generate(policy, given, decoding, noise)[:, :2]
    length = tokens.shape[-1]
    assert torch.equal(tokens, expected[..., :length])
    mask = caption_mask(tokens, captioner.eos_token_id)
    assert mask[:, 0].sum(-1).tolist() == [1, 2, 3], "of different lengths in one batch"
    assert (tokens[~mask] == captioner.pad_token_id).all()
    logits = captioner.token_logits(policy, given, tokens)
    rescored = token_logprobs(logits, tokens, 1.3)[mask]
    assert torch.allclose(rescored, scores[..., :length][mask], atol=1e-4)
    some = captioner.token_logits(policy, given, tokens, mask)
    assert torch.allclose(token_logprobs(some, tokens[mask], 1.3), rescored, atol=1e-4)
    assert not set(tokens[mask].tolist()) & {*captioner.forbidden}


def assert_gradients_of_one_at_a_time(
    captioner: Any,
    batches: list[dict[str, Any]],
    ids: torch.Tensor,
    mask: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """``expected`` log-probabilities, of captions one by one, and their gradient are those of
    ``batches``, and of prefixes that captions share.
    """
    policy = captioner.policy
    weights = torch.linspace(-1, 2, int(mask.sum()))
    policy.zero_grad()
    (expected * weights).sum().backward()
    gradient = gradients(policy)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained <= gradient.keys(), (
        "processes that train together would wait for the missing gradients"
    )
    found = [(captioner.token_logits(policy, one, ids, mask), None) for one in batches]
    shared, row = captioner.prefix_logits(policy, batches[0], ids, mask)
    assert len(shared) < len(expected)
    for logits, rows in (*found, (shared, row)):
        logprobs = token_logprobs(logits, ids[mask], 1.0, rows)
        assert torch.allclose(logprobs, expected, atol=1e-4)
        (logprobs * weights).sum().backward()
        assert_close_gradients(gradients(policy), gradient, 2e-3)
