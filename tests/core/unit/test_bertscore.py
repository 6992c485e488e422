"""BERTScore on tiny random models: the greedy matching by hand, the tokenisers, and
what is refused.
"""

import importlib

import pytest
import torch

from rewards import RewardError
from rewards.registry import build
from rewards.text.bertscore import BertScore

pytest.importorskip("bert_score", reason="the package bert-score is not installed")
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a man dog on the wave park red runs".split()  # noqa: SIM905


SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SHAPE)
    BertModel(config).save_pretrained(folder)
    return folder


def by_hand(folder, layers, caption, reference):
    """Zhang et al. 2020, section 3: each token's best cosine on the other side; [CLS]
    and [SEP] may be matched only.
    """
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    sides = []
    for text in (caption, reference):
        words = [WORDS.index(word) for word in text.split()]
        ids = torch.tensor([[2, *words, 3]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[layers][0]
        sides.append(torch.nn.functional.normalize(states, dim=-1))
    cosines = sides[0] @ sides[1].T
    precision = cosines.max(dim=1).values[1:-1].mean()
    recall = cosines.max(dim=0).values[1:-1].mean()
    return float(2 * precision * recall / (precision + recall))


def test_scores_equal_the_equation(bert):
    captions = ["a man on the wave", "the dog runs", ""]
    references = [["a red dog"], ["a man", "red park a dog"], ["a dog"]]
    for layers in (1, 2):
        reward = build("bertscore", model=str(bert), layers=layers)
        expected = [
            max(by_hand(bert, layers, text, other) for other in texts)
            for text, texts in zip(captions[:2], references[:2], strict=True)
        ]
        found = reward(None, captions, references=references)
        assert found == pytest.approx([*expected, 0.0], abs=1e-5)
        assert reward.signature.startswith(f"BERTScore-F1[{bert.name},")
        assert f",L{layers},no-idf]+bert-score" in reward.signature
    # cut at the model's end
    long = ["a dog on the park " * 20]
    assert len(reward(None, long, references=[["a dog"]])) == 1


def test_the_first_word_has_its_space(tmp_path):
    """RoBERTa's tokeniser: ``dog`` at the start of a caption is the token of ``a dog``."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizer

    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(
        ["a dog runs in the park the dog"] * 50, vocab_size=300, special_tokens=special
    )
    trained.save_model(str(tmp_path))
    RobertaTokenizer.from_pretrained(str(tmp_path)).save_pretrained(tmp_path)
    config = RobertaConfig(vocab_size=310, max_position_embeddings=34, **SHAPE)
    RobertaModel(config).save_pretrained(tmp_path)
    scorer = BertScore(str(tmp_path), 1)
    encode = importlib.import_module("bert_score.utils").sent_encode
    ids = encode(scorer._scorer._tokenizer, "dog runs")
    with_space = trained.encode(" dog").ids[0]
    assert ids[1] == with_space != trained.encode("dog").ids[0]
    assert len(encode(scorer._scorer._tokenizer, "dog " * 90)) == 32


def test_bad_input_is_refused(bert):
    with pytest.raises(ValueError, match="layers"):
        BertScore(str(bert))
    with pytest.raises(ValueError, match="layers 9"):
        BertScore(str(bert), 9)
    reward = BertScore(str(bert), 1)
    with pytest.raises(RewardError, match="row 0"):
        reward(None, ["a dog"], references=[["a dog", " "]])
