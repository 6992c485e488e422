# %% [markdown]
# # From your own photos to a fine-tuned captioner
#
# From a folder of pictures and a file of captions to a captioner that was trained by cross-entropy, fine-tuned by
# self-critical training (SCST) on CIDEr-D, and judged on pictures that it has never seen. Each command is also a
# shell command: `rl_caption("xe --config own_xe")` below is `rl-caption xe --config own_xe`.
#
# The sizes are chosen for minutes on one CPU core.

# %%
IMAGES = 1000  # to train on
XE_STEPS = 300
SCST_STEPS = 60
BATCH_SIZE = 32
WIDTH = 128  # of the model

# %%
import json
import shlex
from pathlib import Path

from rl_caption.cli.main import main


def rl_caption(command: str) -> None:
    """What ``rl-caption COMMAND`` does in a shell."""
    assert main(shlex.split(command)) == 0


# %% [markdown]
# ## Pictures and captions
#
# What is needed is a folder of pictures and a file with one JSON object a line: the picture's path, relative to the
# file, what people say of it, and its split. `train` is learnt, `val` chooses the best weights during training, `test`
# is for the end, when nothing is chosen any more; about 8 : 1 : 1.
#
# So that this runs anywhere, the pictures here are generated: coloured shapes with five captions each ([the generated
# world](../scenes.md)). Put your own `mine.jsonl` in their place; nothing below changes.

# %%
from rl_caption.data.scenes import ScenesData

world = ScenesData(
    num_train=IMAGES, num_val=max(20, IMAGES // 10), num_test=max(20, IMAGES // 6)
)
Path("photos").mkdir(exist_ok=True)

with open("mine.jsonl", "w") as file:
    for split in ("train", "val", "test"):
        for row in world[split]:
            photo = f"photos/{row['image_id']}.png"
            row["image"].render().save(photo)
            references = list(row["references"])
            print(
                json.dumps({"image": photo, "references": references, "split": split}),
                file=file,
            )

for split in ("train", "val", "test"):
    print(
        next(
            line
            for line in Path("mine.jsonl").read_text().splitlines()
            if f'"{split}"' in line
        )
    )

# %% [markdown]
# ## Cross-entropy
#
# SCST improves a captioner that already writes captions, so cross-entropy comes first. `own_xe` is a recipe that the
# package brings (`rl-caption configs show own_xe` prints it): a small Transformer over patches of 8 x 8 pixels, from
# random weights. Any key of a recipe can be changed on the command line ([every key](../api/configuration.md)).

# %%
rl_caption(
    f"xe --config own_xe --data.path mine.jsonl --model.kwargs.d_model {WIDTH} --model.kwargs.ffn_dim {4 * WIDTH}"
    f" --train.max_steps {XE_STEPS} --train.batch_size {BATCH_SIZE} --train.warmup_steps {XE_STEPS // 10}"
    f" --eval.every {XE_STEPS // 2} --run.log_every {XE_STEPS // 3} --train.threads 1"
)

# %% [markdown]
# Before the first step every picture was opened and every caption checked. `loss/xe` is the cross-entropy in nats a
# token: it falls. `val/cider` is CIDEr-D of greedy captions of the `val` pictures, from 0 to 10: it rises. The best
# weights by it are in `runs/own/xe/export/best`.
#
# ## Self-critical training
#
# Now the captioner samples five captions of each picture. Those that score above the others of their picture are made
# likelier, the rest less likely. The score is the metric itself, CIDEr-D, which cross-entropy cannot optimise. The
# learning rate is ten times smaller. `own_scst` starts from the captioner of `own_xe`. `rl-caption run own` does both
# stages in one command.

# %%
rl_caption(
    f"scst --config own_scst --data.path mine.jsonl --train.max_steps {SCST_STEPS} --train.batch_size {BATCH_SIZE}"
    f" --train.warmup_steps {SCST_STEPS // 6} --eval.every {SCST_STEPS // 2} --run.log_every {SCST_STEPS // 3}"
    " --train.threads 1"
)

# %% [markdown]
# `reward/total` is the mean reward of the samples. Look at it together with two other things: `val/cider`, because
# the reward of samples may rise while greedy captions of new pictures do not get better; and `policy/entropy`, which
# falls as the policy becomes sure of what to say. The line `monitor:` names scores that are not in the reward and
# that watch it: an alarm would be printed here ([Hacking of the reward](../scst.md#hacking-of-the-reward)).
#
# A run that was interrupted goes on when the same command is given again.
#
# ## Did it help?
#
# Both captioners write captions of the `test` pictures, which are scored as the COCO toolkit does (METEOR is left
# out: it needs Java).

# %%
for name in ("xe", "scst"):
    rl_caption(
        f"evaluate --model runs/own/{name}/export/best --data.format jsonl --data.path mine.jsonl --split test"
        f" --metrics bleu,rouge,cider --out evaluation/{name}"
    )

# %% [markdown]
# Below each score is its 95 % interval: other test pictures would have given another score within about these limits.
# To say that one captioner is better than the other, compare them on the same pictures. The paired test asks in how
# many of its random exchanges of the two captions of a picture the difference is as large as the one found.

# %%
rl_caption(
    "evaluate --compare evaluation/xe/predictions.json evaluation/scst/predictions.json"
    " --data.format jsonl --data.path mine.jsonl --metrics bleu,rouge,cider --out evaluation/both"
)

# %% [markdown]
# If the interval of a difference contains 0, these pictures do not show which captioner is better. This is one seed;
# before you rely on a difference, train with two more (`--train.seed 1 --run.dir runs/own/scst-1`).
#
# Look at `vocabulary` in the second table, too. SCST tends to make it smaller: what most references say scores well,
# and rare words and details do not.
#
# Read captions, too. A number does not say what changed:

# %%
captions = {
    name: {
        line["image_id"]: line["caption"]
        for line in json.loads(Path(f"evaluation/{name}/predictions.json").read_text())
    }
    for name in ("xe", "scst")
}
shown = list(captions["xe"])[:6]
for photo in shown:
    print(photo, captions["xe"][photo], captions["scst"][photo], sep="\n  ")

# %% [markdown]
# `rl-caption report evaluation/xe evaluation/scst` puts the pictures beside them, in one page.

# %% [markdown]
# ## Caption new photos
#
# Any photo or folder of photos; nothing has to be written about them.

# %%
rl_caption(f"caption --model runs/own/scst/export/best {shown[0]} {shown[1]}")

# %% [markdown]
# ## A vision-language model
#
# The same commands train a vision-language model: `--model.init OWNER/MODEL` names one on the hub, such as
# `HuggingFaceTB/SmolVLM2-256M-Video-Instruct` or `Qwen/Qwen2.5-VL-3B-Instruct`, and `--model.prompt` what it is asked
# ([Captioners](../captioners.md#vision-language-models)). So that this runs in minutes without a hub, the model here is
# made on the spot: LLaVA's architecture, very small, from random weights, with a tokenizer of the captions' words.

# %%
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

lines = [json.loads(line) for line in Path("mine.jsonl").read_text().splitlines()]
texts = [
    caption
    for line in lines
    if line["split"] == "train"
    for caption in line["references"]
]
words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
specials = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
words.train_from_iterator(
    ["describe", *texts], trainers.WordLevelTrainer(special_tokens=specials)
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    additional_special_tokens=["<image>"],
)  # fmt: skip
template = (
    "{% for message in messages %}<s>{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
side = {"height": 64, "width": 64}
processor = LlavaProcessor(
    CLIPImageProcessorPil(size=side, crop_size=side), tokenizer, patch_size=8, chat_template=template,
    vision_feature_select_strategy="default", num_additional_image_tokens=1,
)  # fmt: skip
layers = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
vision = {
    "model_type": "clip_vision_model",
    "image_size": 64,
    "patch_size": 8,
    **layers,
}
text = {
    "model_type": "llama",
    "vocab_size": len(tokenizer),
    "max_position_embeddings": 128,
    **layers,
}
image_token = tokenizer.convert_tokens_to_ids("<image>")
torch.manual_seed(0)
config = LlavaConfig(
    vision_config=vision,
    text_config=text,
    image_token_id=image_token,
    vision_feature_layer=-1,
)
LlavaForConditionalGeneration(config).save_pretrained("runs/own/vlm/start")
processor.save_pretrained("runs/own/vlm/start")

# %% [markdown]
# From random weights the vision tower is trained, too (`--model.freeze []`); by default it is frozen. SCST starts from
# the export, which has the prompt in it.

# %%
rl_caption(
    "xe --model.name huggingface --model.init runs/own/vlm/start --model.prompt describe --model.freeze []"
    f" --data.format jsonl --data.path mine.jsonl --train.max_steps {XE_STEPS} --train.batch_size {BATCH_SIZE}"
    f" --train.lr 1e-3 --train.warmup_steps {XE_STEPS // 10} --eval.every {XE_STEPS // 2}"
    f" --run.log_every {XE_STEPS // 2} --run.dir runs/own/vlm/xe --train.threads 1"
)
rl_caption(
    "scst --model.name huggingface --model.init runs/own/vlm/xe/export/best --model.freeze []"
    f" --data.format jsonl --data.path mine.jsonl --reward.terms.cider.weight 1 --train.max_steps {SCST_STEPS}"
    f" --train.batch_size {BATCH_SIZE} --train.lr 5e-5 --eval.every {SCST_STEPS // 2}"
    f" --run.log_every {SCST_STEPS // 2} --run.dir runs/own/vlm/scst --train.threads 1"
)
rl_caption(
    "evaluate --model runs/own/vlm/scst/export/best --data.format jsonl --data.path mine.jsonl --split test"
    " --metrics bleu,rouge,cider --out evaluation/vlm"
)

# %% [markdown]
# ## What next
#
# - A small captioner from random weights learns what most of a few hundred photos show, no more. Start from a trained
#   captioner (`rl-caption run own_blip`, `rl-caption run own_vlm`, [Captioners](../captioners.md)), or from a frozen
#   image encoder ([Flickr8k](../flickr8k.md)).
# - CIDEr-D rewards what the references mention. [Rewards](../rewards.md) lists what else can be rewarded, and [A
#   reward of your own](reward_of_your_own.py) adds one. `rl-caption run own_mix --data.path
#   mine.jsonl` distils a CLIP-based reward of your data first ([L-CLIP](../reward_models.md#l-clip)).
# - `rl-caption report runs/own/scst` makes a page of curves and captions.
