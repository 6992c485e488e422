"""Captions in Chinese, Japanese, German, Hindi and Arabic: tokens, rewards, training
and evaluation.
"""

import unicodedata

import pytest
import regex
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocoevalcap.cider.cider import Cider

from rewards.registry import REWARDS, build
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import TOKENIZERS, cjk_characters, join_cjk, unicode_words
from rl_caption.captioners.config import NewModelConfig, SavedModelConfig
from rl_caption.config.build import build_captioner, build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm
from rl_caption.data.base import Splits
from rl_caption.data.checks import check_data
from rl_caption.evaluation import evaluate_captions, validation_cider
from rl_caption.evaluation.metrics import warn_of_forms
from rl_caption.evaluation.samples import evaluate_samples
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.rule import (
    Findings,
    Thresholds,
    caption_statistics,
    judge_alarm,
    reference_statistics,
)
from rl_caption.programs.captions import build_reranker
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import SHAPE

CHINESE = {
    "1": ["一只橘猫躺在沙发上。", "沙发上有一只猫"],
    "2": ["两个人在海边骑自行车。", "海边，两名男子骑着自行车"],
    "3": ["一个女孩拿着iPhone 15自拍", "穿红裙子的女孩在自拍！"],
}
SPACED = {
    "1": ["一 只 橘 猫 躺 在 沙 发 上", "沙 发 上 有 一 只 猫"],
    "2": ["两 个 人 在 海 边 骑 自 行 车", "海 边 两 名 男 子 骑 着 自 行 车"],
    "3": ["一 个 女 孩 拿 着 iphone 15 自 拍", "穿 红 裙 子 的 女 孩 在 自 拍"],
}
CAPTIONS = {
    "1": "一只猫在沙发上",
    "2": "一个男子在海边骑自行车",
    "3": "女孩拿着iPhone自拍",
}
SPACED_CAPTIONS = {
    "1": "一 只 猫 在 沙 发 上",
    "2": "一 个 男 子 在 海 边 骑 自 行 车",
    "3": "女 孩 拿 着 iphone 自 拍",
}
"""What people would write by hand for the toolkit."""
GERMAN = {
    "1": ["Ein Mann zieht sich die Schuhe an.", "Ein Mann sitzt auf einer Bank."],
    "2": ["Zwei Männer spielen Fußball.", "Kinder spielen im Park."],
}
WORDS = [
    (
        "unicode",
        "Zwei Männer in Straßenkleidung spielen Fußball.",
        "zwei männer in straßenkleidung spielen fußball",
    ),
    ("unicode", "एक कुत्ता हरी घास पर दौड़ रहा है।", "एक कुत्ता हरी घास पर दौड़ रहा है"),
    ("unicode", "رجلٌ يركبُ درّاجةً، في الشارع!", "رجلٌ يركبُ درّاجةً في الشارع"),
    (
        "unicode",
        "می\u200cدود",
        "میدود",
    ),  # Persian: a zero-width non-joiner lies within a word
    ("unicode", "Ｃａｆé, l'ﬁlm", "café l film"),  # NFKC: full width, a ligature
    ("unicode", "cafe\u0301", "café"),
    (
        "char",
        "一只橘猫躺在2张iPhone 15旁边，很可爱！",
        "一 只 橘 猫 躺 在 2 张 iphone 15 旁 边 很 可 爱",
    ),
    (
        "char",
        "ラーメンを食べる人々。ｶﾞﾗｽの上",
        "ラ ー メ ン を 食 べ る 人 々 ガ ラ ス の 上",
    ),
    ("char", "葛\U000e0100城の桜❤️", "葛 城 の 桜"),  # variation selectors are no tokens
    ("char", "두 남자가 걷고 있다.", "두 남자가 걷고 있다"),
]


def test_tokens():
    for tokenizer, text, expected in WORDS:
        tokens = TOKENIZERS[tokenizer](text)
        assert tokens == [
            unicodedata.normalize("NFKC", word) for word in expected.split()
        ]
        assert TOKENIZERS[tokenizer](" ".join(tokens)) == tokens, (
            "tokens of tokens are the tokens"
        )


@given(st.text(st.characters(exclude_categories=["Cf", "Cs", "Cn"]), max_size=40))
def test_words_are_runs_of_letters_marks_and_digits(text):
    """As another library's classes of Unicode characters say."""
    text = regex.sub(r"\p{Variation_Selector}", "", text)
    plain = unicodedata.normalize("NFKC", text).lower()
    assert unicode_words(text) == regex.findall(r"[\p{L}\p{M}\p{N}]+", plain)
    assert cjk_characters(join_cjk(cjk_characters(text))) == cjk_characters(text)


def test_cider_of_characters_is_the_toolkits_of_spaced_text():
    spaced = {key: [text] for key, text in SPACED_CAPTIONS.items()}
    mean, expected = Cider().compute_score(SPACED, spaced)
    captions = list(CAPTIONS.values())
    references = list(CHINESE.values())
    columns = {"references": references, "image_id": list(CHINESE)}
    found = build("cider", eos=False, tokenizer="char")(
        None,
        captions,
        **columns,
    )
    assert found == pytest.approx(expected.tolist(), rel=1e-12)
    of_validation = validation_cider(CAPTIONS, CHINESE, "char")
    assert of_validation == pytest.approx(mean, rel=1e-12)
    by_words = build("cider", eos=False)(
        None,
        captions,
        **columns,
    )
    assert max(by_words) < 0.1 < 0.5 < min(found)
    judges = build_judges(
        {"cider": JudgeConfig()},
        None,
        references,
        tokenizer="char",
    )
    judged = judges["cider"](None, captions, references=references)
    assert judged == pytest.approx(found)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # precision 4/6, recall 1
        ("rouge_l", {}, 2.44 * (4 / 6) / (1 + 1.44 * 4 / 6)),
        ("bleu", {"n": 1}, 4 / 6),
        ("repetition", {}, -1 / 5),
    ],
)
def test_rewards_count_the_named_tokens(name, options, expected):
    reward = build(name, tokenizer="char", **options)
    found = reward(
        None,
        ["女孩女孩自拍"],
        references=[["女孩自拍"]],
    )
    assert found == pytest.approx([expected])


def test_captions_are_compared_by_the_named_tokens():
    texts = ["一只猫", "一只狗"]
    ids = {"image_id": ["1", "1"]}
    diversity = build("diversity", eos=False, tokenizer="char")
    assert diversity(None, texts, **ids)[0] < 1
    assert build("diversity", eos=False)(None, texts, **ids) == [1, 1]
    assert build("consensus", tokenizer="char")(None, texts, **ids)[0] > 0
    samples = {"1": texts, "2": ["海边", "海滩"]}
    found = evaluate_samples(samples, CHINESE, tokenizer="char")
    assert found.metrics["Div-1"] == pytest.approx((4 / 6 + 3 / 4) / 2)


def test_tokenizers_are_named_and_do_not_mix():
    references = list(CHINESE.values())
    counted = DocumentFrequencies.from_texts(references, eos=True, tokenizer="char")
    with pytest.raises(ValueError, match=r"'char'.*'unicode'"):
        build("cider", df=counted, tokenizer="unicode")
    names = ("cider", "bleu", "rouge_l", "repetition", "diversity")
    terms = {name: RewardTerm() for name in names}
    terms |= {f"my_{name}": RewardTerm(target=REWARDS[name]) for name in names}
    made = build_reward(
        RewardConfig(terms=terms),
        references,
        tokenizer="char",
    )
    assert made.tokenizer == "char"
    assert all("char" in reward.signature for reward in made.rewards.values())
    reranker = build_reranker("consensus", {}, references, "char")
    assert "char" in reranker.signature


def test_evaluation_says_what_is_english():
    novel = ["一只猫，在沙发上！"]
    found = evaluate_captions(
        CAPTIONS, CHINESE, tokenizer="char", training_captions=novel
    )
    metrics = ("bleu", "rouge", "cider")
    plain = evaluate_captions(
        SPACED_CAPTIONS, SPACED, metrics=metrics, tokenizer="none"
    )
    for key in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"):
        assert found.metrics[key] == plain.metrics[key]
    assert set(found.left_out) == {"METEOR", "SPICE", "captions/bad_endings"}
    assert found.metrics["captions/novel"] == pytest.approx(2 / 3)
    characters = set("".join(SPACED_CAPTIONS.values()).replace("iphone", "i")) - {" "}
    assert found.metrics["vocabulary/size"] == len(characters)


def test_the_monitor_has_no_english_endings():
    """``an`` ends German sentences."""
    texts = [references[0] for references in GERMAN.values()]
    assert caption_statistics(texts)["bad_endings"] == 0.5
    seen = caption_statistics(texts, "unicode")
    usual = reference_statistics(list(GERMAN.values()), "unicode")
    assert "bad_endings" not in {*seen, *usual}
    start, now = (Findings(reward, {}, seen) for reward in (0.0, 1.0))
    assert judge_alarm(now, start, usual, Thresholds()) == {}


def test_a_vocabulary_of_characters(tmp_path):
    options = {"image_size": 16, "patch_size": 8, **SHAPE}
    model = NewModelConfig(min_count=1, kwargs=options)
    references = list(CHINESE.values())
    captioner = build_captioner(model, references, 0, "char")
    ids = captioner.encode(["女孩拿着iPhone 15自拍！"], 16)
    assert len(ids[0]) == 9
    assert captioner.decode(torch.tensor(ids)) == ["女孩拿着iphone 15自拍"]
    captioner.save_pretrained(captioner.policy, tmp_path)
    saved = SavedModelConfig(init=str(tmp_path))
    again = build_captioner(saved, references, 0, "char")
    assert again.encode(["女孩拿着iPhone 15自拍！"], 16) == ids
    with pytest.raises(ConfigError, match=r"'char', data.tokenizer is 'ptb'"):
        build_captioner(saved, references, 0)


THAI = {"1": ["แมวสีส้มนอนอยู่บนโซฟา", "มีแมวอยู่บนโซฟา"]}
ENGLISH = {
    "1": ["a sign that says 東京駅 above a door", "a café"],
    "2": ["고양이가 소파에 있다"],
}


@pytest.mark.parametrize(
    ("texts", "tokenizer", "advice"),
    [
        *((CHINESE, name, "char") for name in ("ptb", "unicode", "none")),
        *((THAI, name, "spaces between words") for name in ("ptb", "none")),
        (CHINESE, "char", ""),
        (SPACED, "ptb", ""),
        (ENGLISH, "ptb", ""),
        (CHINESE, None, ""),
    ],
)
def test_captions_without_spaces_are_warned_of_where_words_are_counted(
    texts, tokenizer, advice, caplog
):
    rows = [
        {"image_id": name, "image": Image.new("RGB", (8, 8)), "references": captions}
        for name, captions in list(texts.items())[:1]
    ]
    splits = Splits({"train": rows}, "here")
    report = check_data(splits, ["train"], tokenizer=tokenizer)
    assert len(report.warnings) == bool(advice)
    assert advice in "".join(report.warnings)
    if tokenizer:
        captions = {image_id: own[0] for image_id, own in texts.items()}
        with caplog.at_level("WARNING"):
            warn_of_forms(captions, texts, tokenizer)
        assert len(caplog.records) == bool(advice)
        assert advice in caplog.text
