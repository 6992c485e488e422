"""Captions in Chinese, Japanese, German, Hindi and Arabic: tokens, rewards, training and
evaluation.
"""

import unicodedata
from typing import Any

import pytest
import regex
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from rewards.registry import REWARDS, build
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import TOKENIZERS, cjk_characters, join_cjk, unicode_words
from rl_caption.captioners.config import Decoding, NewModelConfig, SavedModelConfig
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.config.build import build_captioner, build_reward
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import DataConfig, RewardConfig, RewardTerm
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
    ids = list(CHINESE)
    expected = Cider().compute_score(
        SPACED, {key: [SPACED_CAPTIONS[key]] for key in ids}
    )
    reward = build("cider", eos=False, tokenizer="char")
    found = reward(
        None,
        list(CAPTIONS.values()),
        references=[CHINESE[key] for key in ids],
        image_id=ids,
    )
    assert found == pytest.approx(expected[1].tolist(), rel=1e-12)
    assert min(found) > 0.5
    assert validation_cider(CAPTIONS, CHINESE, "char") == pytest.approx(
        expected[0], rel=1e-12
    )
    by_words = build("cider", eos=False)(
        None, list(CAPTIONS.values()), references=list(CHINESE.values()), image_id=ids
    )
    assert max(by_words) < 0.1, (
        "the toolkit's English tokenizer finds next to nothing in common"
    )
    judge = build_judges(
        {"cider": JudgeConfig()}, None, list(CHINESE.values()), tokenizer="char"
    )["cider"]
    assert judge(
        None, list(CAPTIONS.values()), references=list(CHINESE.values())
    ) == pytest.approx(found)


def test_rewards_count_the_named_tokens():
    text, references = ["女孩女孩自拍"], [["女孩自拍"]]
    rouge = Rouge().compute_score({"1": ["女 孩 自 拍"]}, {"1": ["女 孩 女 孩 自 拍"]})[
        0
    ]
    assert build("rouge_l", tokenizer="char")(
        None, text, references=references
    ) == pytest.approx([rouge])
    assert build("bleu", n=1, tokenizer="char")(
        None, text, references=references
    ) == pytest.approx([4 / 6])
    assert build("repetition", tokenizer="char")(None, text) == [-1 / 5]
    two = {"image_id": ["1", "1"]}
    assert (
        build("diversity", eos=False, tokenizer="char")(
            None, ["一只猫", "一只狗"], **two
        )[0]
        < 1
    )
    assert build("diversity", eos=False)(None, ["一只猫", "一只狗"], **two) == [1, 1]
    assert (
        build("consensus", tokenizer="char")(None, ["一只猫", "一只狗"], **two)[0] > 0
    )
    samples = evaluate_samples(
        {"1": ["一只猫", "一只狗"], "2": ["海边", "海滩"]}, CHINESE, tokenizer="char"
    )
    assert samples.metrics["Div-1"] == pytest.approx((4 / 6 + 3 / 4) / 2)


def test_tokenizers_are_named_and_do_not_mix(tmp_path):
    counted = DocumentFrequencies.from_texts(
        CHINESE.values(), eos=True, tokenizer="char"
    )
    counted.save(tmp_path / "df.npz")
    with pytest.raises(ValueError, match=r"'char'.*'unicode'"):
        build("cider", df=tmp_path / "df.npz", tokenizer="unicode")
    terms = {
        name: RewardTerm()
        for name in ("cider", "bleu", "rouge_l", "repetition", "diversity")
    }
    made = build_reward(
        RewardConfig(terms=terms), list(CHINESE.values()), tokenizer="char"
    )
    assert made.tokenizer == "char"
    assert all("char" in reward.signature for reward in made.rewards.values())
    again = {f"my_{name}": RewardTerm(target=REWARDS[name]) for name in terms}
    twice = build_reward(
        RewardConfig(terms=terms | again), list(CHINESE.values()), tokenizer="char"
    ).rewards
    assert [twice[f"my_{name}"].signature for name in terms] == [
        twice[name].signature for name in terms
    ]
    plain = build_reward(RewardConfig(terms=terms), list(CHINESE.values()))
    assert all("char" not in reward.signature for reward in plain.rewards.values())
    assert (
        "char"
        in build_reranker("consensus", {}, list(CHINESE.values()), "char").signature
    )
    with pytest.raises(
        ValueError, match=r"data.tokenizer is 'char'.*remove_bad_endings"
    ):
        EvaluateModelConfig(
            model="m",
            data=DataConfig(tokenizer="char", path="d"),
            decode=Decoding(remove_bad_endings=True),
        )


def test_evaluation_says_what_is_english():
    found = evaluate_captions(
        CAPTIONS, CHINESE, tokenizer="char", training_captions=["一只猫，在沙发上！"]
    )
    plain = evaluate_captions(
        SPACED_CAPTIONS, SPACED, metrics=("bleu", "rouge", "cider"), tokenizer="none"
    )
    same = ["BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"]
    assert [found.metrics[key] for key in same] == [plain.metrics[key] for key in same]
    assert set(found.left_out) == {"METEOR", "SPICE", "captions/bad_endings"}
    assert found.metrics["captions/novel"] == pytest.approx(2 / 3)
    assert found.metrics["vocabulary/size"] == len(
        {c for text in SPACED_CAPTIONS.values() for c in text.split()}
    )
    other = evaluate_captions(
        CAPTIONS, CHINESE, metrics=("rouge",), tokenizer="unicode"
    )
    assert "tokenizer:char[NFKC," in found.signature
    assert "tokenizer:unicode[NFKC," in other.signature


def test_the_monitor_has_no_english_endings():
    """``an`` ends German sentences."""
    texts = [references[0] for references in GERMAN.values()]
    assert caption_statistics(texts)["bad_endings"] == 0.5
    seen, usual = (
        caption_statistics(texts, "unicode"),
        reference_statistics(list(GERMAN.values()), "unicode"),
    )
    assert "bad_endings" not in {*seen, *usual}
    start = Findings(0.0, {}, seen)
    assert judge_alarm(Findings(1.0, {}, seen), start, usual, Thresholds()) == {}
    worse = caption_statistics(["Mann Mann Mann Mann Mann Mann"] * 2, "unicode")
    assert "repeated_ngrams" in judge_alarm(
        Findings(1.0, {}, worse), start, usual, Thresholds()
    )


def test_a_vocabulary_of_characters(tmp_path):
    options: dict[str, Any] = {"image_size": 16, "patch_size": 8, **SHAPE}
    references = list(CHINESE.values())
    captioner = build_captioner(
        NewModelConfig(min_count=1, kwargs=options), references, 0, "char"
    )
    assert isinstance(captioner, TransformerCaptioner)
    text = "女孩拿着iPhone 15自拍！"
    ids = captioner.encode([text], 16)
    assert len(ids[0]) == 8 + 1
    assert captioner.decode(torch.tensor(ids)) == ["女孩拿着iphone 15自拍"]
    captioner.save_pretrained(captioner.policy, tmp_path)
    again = build_captioner(SavedModelConfig(init=str(tmp_path)), references, 0, "char")
    assert again.encode([text], 16) == ids
    with pytest.raises(ConfigError, match=r"'char', data.tokenizer is 'ptb'"):
        build_captioner(SavedModelConfig(init=str(tmp_path)), references, 0)


SEGMENTED = {
    "1": ["一只 橘猫 躺 在 沙发 上 。", "沙发 上 有 一只 猫"],
    "2": ["スケートボード に 乗る 男性", "海辺 を 自転車 で 走る 二人"],
}
JAPANESE = {
    "1": ["ソファの上で猫が寝ている。", "猫とソファ"],
    "2": ["スケートボードに乗る男性"],
}
THAI = {"1": ["แมวสีส้มนอนอยู่บนโซฟา", "มีแมวอยู่บนโซฟา"]}
SPACED_THAI = {"1": ["แมว สี ส้ม นอน อยู่ บน โซฟา", "มี แมว อยู่ บน โซฟา"]}
ENGLISH = {
    "1": ["a sign that says 東京駅 above a door", "a café"],
    "2": ["고양이가 소파에 있다"],
}


@pytest.mark.parametrize(
    ("texts", "tokenizer", "advice"),
    [
        *((CHINESE, name, "char") for name in ("ptb", "unicode", "none")),
        (JAPANESE, "ptb", "char"),
        ({"1": ["一只狗", "两个孩子"]}, "ptb", "char"),
        *((THAI, name, "spaces between words") for name in ("ptb", "char", "none")),
        *((texts, "char", "") for texts in (CHINESE, JAPANESE)),
        *((texts, "ptb", "") for texts in (SPACED, SEGMENTED, SPACED_THAI, ENGLISH)),
    ],
)
def test_captions_without_spaces_are_warned_of_where_words_are_counted(
    texts,
    tokenizer,
    advice,
    caplog,
):
    rows = [
        {
            "image_id": image_id,
            "image": Image.new("RGB", (8, 8), (int(image_id), 0, 0)),
            "references": captions,
        }
        for image_id, captions in texts.items()
    ]
    report = check_data(Splits({"train": rows}, "here"), ["train"], tokenizer=tokenizer)
    captions = {image_id: references[0] for image_id, references in texts.items()}
    with caplog.at_level("WARNING"):
        warn_of_forms(captions, texts, tokenizer)
    logged = [record.message for record in caplog.records]
    assert len(report.warnings) == len(logged) == bool(advice)
    if advice:
        number = sum(map(len, texts.values()))
        assert report.warnings[0].startswith(f"{number} of {number} texts")
        assert advice in report.warnings[0]
        assert advice in logged[0]


def test_models_that_read_captions_themselves_are_not_warned_of_words():
    rows = [
        {"image_id": "1", "image": Image.new("RGB", (8, 8)), "references": CHINESE["1"]}
    ]
    assert not check_data(
        Splits({"train": rows}, "here"), ["train"], tokenizer=None
    ).warnings
