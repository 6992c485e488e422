"""Configuration: dataclasses only. ``cli`` fills them from YAML and the command line, ``build.py`` reads them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from rl_caption.captioners.config import LoraConfig as LoraConfig
from rl_caption.captioners.config import ModelConfig as ModelConfig
from rl_caption.monitoring.config import JudgeConfig as JudgeConfig
from rl_caption.monitoring.config import MonitorConfig
from rl_caption.options import (
    BatchSize,
    Beams,
    LearningRate,
    LengthPenalty,
    Mebibytes,
    Positive,
    Probability,
    Range,
    Resamples,
    Seed,
    Steps,
    Temperature,
    Tokens,
    Weight,
    Workers,
)


@dataclass
class DataConfig:
    """The images and their captions.

    Args:
        format: ``karpathy`` (one JSON with splits), ``jsonl`` (one JSON object a line), ``scenes`` (generated world),
            ``moving_scenes`` (the same in motion, docs/video.md); for one tower of L-CLIP, ``images`` (a folder of
            them) or ``captions`` (a text file) alone; ``caption_targets``, captions with a number each, for
            ``text_regression``.
        target: ``package.module:Name`` of a format outside this package (docs/data.md); null takes ``format``.
        path: the JSON file, or the folder that holds it; the folder of ``images``; the file or folder of ``captions``.
        image_root: folder of the images, relative to the JSON's folder or absolute.
        image_extension: replaces the extension that the JSON gives, such as ``.jpg``.
        flatten: ignore the folder (``filepath``) that the JSON gives.
        features_root: region features: a folder with one file an image, or one HDF5 file; relative to the working
            directory.
        features_kwargs: how they are stored and read, such as ``{dim: 2048, box_features: normalised}`` (docs/data.md).
        augment: train on random views, ``horizontal``, ``vertical``, ``transpose``, ``crop``, ``shift``, ``rotate``;
            only where captions stay true of them. ``rand_augment``: reward models only.
        tokenizer: of captions, in n-gram rewards, document frequencies, validation, the monitor and a new captioner's
            vocabulary: ``ptb`` (English, the COCO toolkit's), ``unicode`` (words of languages that write spaces) or
            ``char`` (characters of Chinese and Japanese); docs/languages.md.
        on_bad: ``fail`` stops on unusable images and captions; ``skip`` leaves them out and says so.
        check_images: decode every image before training starts.
        num_workers: loader processes; 0 loads in the main process.
        cache_mb: memory for decoded, resized images, in MiB a process; 0 decodes them every time.
        long_captions: the caption of an image is its long description (``long_reference``), in training, rewards and
            validation alike; ``jsonl`` and ``scenes``.
        num_frames: the files are videos (folders of frames, animated images, video files), each of which is so many of
            its frames, the centres of equal segments (docs/video.md); null: they are images.
        kwargs: further arguments of the format, such as ``{num_train: 2000, seed: 1}`` for ``scenes``.
    """

    format: Literal["karpathy", "jsonl", "scenes", "moving_scenes", "images", "captions", "caption_targets"] = (
        "karpathy"
    )
    target: str | None = None
    path: str | None = None
    image_root: str | None = None
    image_extension: str | None = None
    flatten: bool = False
    features_root: str | None = None
    features_kwargs: dict = field(default_factory=dict)
    augment: list[Literal["horizontal", "vertical", "transpose", "crop", "shift", "rotate", "rand_augment"]] = field(
        default_factory=list
    )
    tokenizer: Literal["ptb", "unicode", "char"] = "ptb"
    on_bad: Literal["fail", "skip"] = "fail"
    check_images: bool = True
    num_workers: Annotated[int, Range(min=0, max=1024)] = 0
    cache_mb: Mebibytes = 1024
    long_captions: bool = False
    num_frames: Annotated[int, Range(min=1, max=4096)] | None = None
    kwargs: dict = field(default_factory=dict)


Schedule: TypeAlias = list[tuple[Annotated[int, Range(min=0, max=10**9)], Weight]]
"""Points (step, factor): linear in between, constant before the first and after the last; equal steps are a jump."""


@dataclass
class RewardTerm:
    """One reward of the mixture.

    Args:
        weight: factor of the raw score in the total.
        target: ``package.module:Class`` of a reward, or the name of one of this package; null takes the term's name.
        kwargs: arguments of the reward.
        schedule: points ``[step, factor]``: the weight is multiplied by the factor, which is linear between two points
            and constant before the first and after the last; two points of one step are a jump (docs/schedules.md);
            null keeps the weight.
        length_ratio: ``[0.5, 2]``: captions shorter or longer than so many times the mean length of their references
            have the score 0; null masks none.
    """

    weight: Annotated[float, Range(min=-(10**6), max=10**6)] = 1.0
    target: str | None = None
    kwargs: dict = field(default_factory=dict)
    schedule: Schedule | None = None
    length_ratio: tuple[Weight, Weight] | None = None


@dataclass
class TrustConfig:
    """What all programs have in common that load saved models.

    Args:
        trust: ``package.module:Class`` of each class outside this package that a saved model's ``config.json`` may
            name; it is then imported and called with what stands there (docs/reliability.md). A class that the
            configuration names itself, such as ``model.target``, needs no line here.
    """

    trust: list[str] = field(default_factory=list, kw_only=True)


@dataclass
class RewardConfig:
    """What samples are scored by: a weighted sum of terms.

    Args:
        terms: name to weight and arguments.
        normalize: ``none`` adds raw scores; ``per_term`` adds z-scores of every term over the samples of an optimizer
            step, so that weights compare whatever the terms' scales are; ``per_group`` over the samples of each image.
        df: document frequencies of CIDEr-D, also as a similarity of samples (``diversity``); null builds them from the
            training split, one document an image.
        eos: EOS counts as a word of hypotheses, references and document frequencies.
    """

    terms: dict[str, RewardTerm] = field(default_factory=lambda: {"cider": RewardTerm()})
    normalize: Literal["none", "per_term", "per_group"] = "none"
    df: str | None = None
    eos: bool = True


@dataclass
class RolloutConfig:
    """How captions are sampled.

    Args:
        num_samples: captions sampled for each image (K).
        temperature: softmax temperature, in sampling and in scoring alike.
        temperature_schedule: points ``[step, factor]`` of the temperature, as ``schedule`` of a reward term.
        max_new_tokens: length limit in tokens, EOS included.
        dropout: keep dropout on in sampling and scoring (the first self-critical codes did); off keeps the update
            on-policy.
        cuda_graph: decode by replaying a CUDA graph, recorded at the first step: the same captions, without the time
            that a GPU waits for kernels to be started. Needs a CUDA device, inputs of few sizes, weights that stay in
            place (no ZeRO-3) and ``dropout`` off.
        beam_search: the K captions are all those of a beam search of width K (length penalty 1), in place of samples:
            for objectives that compare the captions of an image, such as DiCO, whose paper does so.
    """

    num_samples: Annotated[int, Range(min=1, max=4096)] = 5
    temperature: Temperature = 1.0
    temperature_schedule: Schedule | None = None
    max_new_tokens: Tokens = 24
    dropout: bool = False
    cuda_graph: bool = False
    beam_search: bool = False


@dataclass
class TrainConfig:
    """Optimisation, common to every training.

    Args:
        max_steps: optimizer steps; null takes ``epochs``.
        epochs: passes over the training images, used where ``max_steps`` is null.
        batch_size: images of one optimizer step, over all processes and accumulation steps.
        micro_batch_size: images of one forward pass of one process; null is ``batch_size`` / processes. The rest is
            gradient accumulation, which does not change the step.
        lr: peak learning rate of Adam.
        schedule: ``constant``, ``linear`` or ``cosine`` decay to 0, ``step`` (times ``decay`` every ``decay_every``
            steps, or ``decay_epochs``) or ``noam`` (inverse square root), all after ``warmup_steps`` of linear warm-up.
        warmup_steps: optimizer steps.
        decay: factor of ``step``.
        decay_every: optimizer steps between two decays of ``step``.
        decay_epochs: epochs between two decays of ``step``, in place of ``decay_every``.
        betas: Adam's.
        weight_decay: decoupled (AdamW).
        grad_clip_norm: largest gradient norm; null does not clip.
        grad_clip_value: largest absolute gradient, as in self-critical.pytorch (0.1); null does not clip.
        mixed_precision: ``no``, ``bf16`` or ``fp16``, or ``auto``: bf16 where the device computes with it, else no.
        tf32: on a GPU, let float32 products and convolutions round their factors to TF32 (10 bits of mantissa): several
            times as fast, and no longer the numbers of a CPU.
        num_processes: processes that must train together; null checks what the launcher says.
        threads: CPU threads of a process; null takes your OMP_NUM_THREADS; where you set none, it divides the physical
            cores that may be used among the processes of the machine.
        seed: of weights, data order and samples.
        label_smoothing: of the cross-entropy.
    """

    max_steps: Steps | None = None
    epochs: Positive = 1.0
    batch_size: BatchSize = 50
    micro_batch_size: BatchSize | None = None
    lr: LearningRate = 5e-4
    schedule: Literal["constant", "linear", "cosine", "step", "noam"] = "constant"
    warmup_steps: Annotated[int, Range(min=0, max=10**9)] = 0
    decay: Annotated[float, Range(above=0, max=1)] = 0.8
    decay_every: Steps = 1000
    decay_epochs: Positive | None = None
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    weight_decay: Weight = 0.0
    grad_clip_norm: Positive | None = 1.0
    grad_clip_value: Positive | None = None
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = "no"
    tf32: bool = False
    num_processes: Workers | None = None
    threads: Workers | None = None
    seed: Seed = 0
    label_smoothing: Probability = 0.0


@dataclass
class XeTrainConfig(TrainConfig):
    """Cross-entropy training. Further arguments:

    Args:
        captions_per_image: references of an image that one step learns; null learns all.
        max_target_tokens: longest reference in tokens, EOS included; the rest is cut off.
    """

    label_smoothing: Probability = 0.1
    captions_per_image: Steps | None = 5
    max_target_tokens: Tokens = 24


@dataclass
class ScstTrainConfig(TrainConfig):
    """Self-critical training. Further arguments:

    Args:
        advantage: baseline of a sample: ``leave_one_out`` (mean of the others), ``greedy`` (classic SCST), ``mean``,
            ``group_norm`` (GRPO), ``none``; or one from outside, ``package.module:Name`` (docs/scst.md).
        advantage_kwargs: options of the advantage.
        objective: what is minimised: ``reinforce``, ``ppo_clip`` (also GRPO's), ``dico``, ``seq_nll``, ``risk``,
            ``max_margin``, ``multi_margin``, ``softmax_margin``; or one from outside, ``package.module:Name``
            (docs/scst.md).
        objective_kwargs: options of the objective, besides ``loss_reduction`` and ``kl_coef``.
        updates_per_rollout: optimizer updates on the samples of a step, each on all of them; all else counts steps.
        loss_reduction: ``token`` (mean over tokens) or ``sequence`` (mean over captions). The learning rate goes with
            it: the two differ by about the caption length.
        kl_coef: weight of the KL divergence to the frozen starting policy, per token; 0 loads no second model.
        kl_target: divergence (``policy/kl``, nats per token) that ``kl_coef`` is adapted to from step to step; null
            keeps ``kl_coef`` as it is.
        kl_horizon: captions within which an error of the divergence is corrected.
        xe_weight: weight of a cross-entropy term on the references, token mean.
    """

    lr: LearningRate = 5e-6
    advantage: str = "leave_one_out"
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    objective: str = "reinforce"
    objective_kwargs: dict[str, Any] = field(default_factory=dict)
    updates_per_rollout: Annotated[int, Range(min=1, max=1000)] = 1
    loss_reduction: Literal["token", "sequence"] = "token"
    kl_coef: Weight = 0.0
    kl_target: Positive | None = None
    kl_horizon: Steps = 10_000
    xe_weight: Weight = 0.0


@dataclass
class EvalConfig:
    """Validation during training.

    Args:
        every: optimizer steps between two validations; null is once an epoch. One more follows the last step.
        split: its name.
        max_images: the first so many images of the split; null takes all.
        batch_size: images decoded at a time, in each process.
        patience: stop after so many validations in a row without a better value of the metric that chooses the best
            model (of captioners CIDEr-D, unless a judge is named); null never stops early.
    """

    every: Steps | None = None
    split: str = "val"
    max_images: Steps | None = None
    batch_size: BatchSize = 64
    patience: Steps | None = None


@dataclass
class CaptionEvalConfig(EvalConfig):
    """Validation of a captioner during training. Further arguments:

    Args:
        num_beams: width of beam search; null decodes greedily.
        length_penalty: of beam search: log-probabilities are divided by length**length_penalty; null is 0, their sum.
    """

    num_beams: Beams | None = None
    length_penalty: LengthPenalty | None = None


@dataclass
class RunConfig:
    """Where a run lives and how it is watched.

    Args:
        dir: the run's folder.
        resume: ``auto`` goes on from the newest checkpoint of an equal configuration, or starts; ``true`` goes on and
            accepts a changed configuration; ``false`` starts, and refuses a folder that holds a run; or the path of a
            checkpoint.
        save_every: optimizer steps between two checkpoints; null saves at every validation.
        keep_checkpoints: newest ones kept.
        log_every: optimizer steps between two log lines.
        log_samples: images (of several processes, the main one's) whose samples are written to ``samples.jsonl`` at
            every log line.
        trackers: ``tensorboard``, ``wandb``, ... through Accelerate, besides ``metrics.jsonl``.
    """

    dir: str = "runs/run"
    resume: bool | str = "auto"
    save_every: Steps | None = None
    keep_checkpoints: Steps = 2
    log_every: Steps = 10
    log_samples: Annotated[int, Range(min=0, max=10**6)] = 2
    trackers: list[str] = field(default_factory=list)


@dataclass
class XeConfig(TrustConfig):
    """``xe``: a captioner by cross-entropy.

    Args:
        model: the captioner.
        data: images and captions.
        train: optimisation.
        eval: validation.
        run: folder, resume, logs.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: XeTrainConfig = field(default_factory=XeTrainConfig)
    eval: CaptionEvalConfig = field(default_factory=CaptionEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass
class ScstConfig(TrustConfig):
    """``scst``: a captioner by self-critical sequence training.

    Args:
        model: the captioner; ``model.init`` is the one to start from.
        warm_start: configuration of a cross-entropy run that makes ``model.init`` where it does not exist yet.
        reward_models: configurations of reward models to train first, where they are not there yet.
        data: images and captions.
        rollout: sampling.
        reward: what samples are scored by.
        train: optimisation.
        eval: validation.
        monitor: signs of reward hacking.
        run: folder, resume, logs.
        report: write ``report.html`` into the run's folder at its end (docs/report.md).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: str | None = None
    reward_models: list[str] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: ScstTrainConfig = field(default_factory=ScstTrainConfig)
    eval: CaptionEvalConfig = field(default_factory=CaptionEvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)
    report: bool = True


@dataclass
class DecodeConfig:
    """How captions are decoded.

    Args:
        num_beams: 1 is greedy.
        max_new_tokens: length limit in tokens, EOS included.
        length_penalty: of beam search: log-probabilities are divided by length**length_penalty. 1 compares means, as
            Transformers does; 0 compares sums, as self-critical.pytorch does (docs/coco.md).
        batch_size: images at a time.
        num_return_sequences: of beam search: the so many best captions of an image, for ``rerank`` or ``candidates``.
        num_beam_groups: of beam search: above 1 is diverse beam search; divides ``num_beams``.
        diversity_penalty: of groups: subtracted from a token's log-probability for each beam of an earlier group that
            takes it.
        num_samples: captions sampled for each image, in place of greedy or beam search; 0 samples none.
        temperature: of samples.
        top_k: samples are drawn from the so many likeliest tokens; 0 is all.
        top_p: samples are drawn from the likeliest tokens with this probability in all (nucleus); 1 is all.
        typical_p: samples are drawn from the most typical tokens with this probability in all; 1 is all.
        no_repeat_ngram_size: no caption has the same n tokens in a row twice; 0 allows it.
        block_trigrams: a token that would repeat a trigram loses 0.693 times this of its log-probability for each
            earlier occurrence; 2 is self-critical.pytorch's ``block_trigrams``.
        remove_bad_endings: no caption ends at an article, a preposition, a conjunction or an auxiliary, unless the
            length limit cuts it off there.
    """

    num_beams: Beams = 1
    max_new_tokens: Tokens = 24
    length_penalty: LengthPenalty = 1.0
    batch_size: BatchSize = 64
    num_return_sequences: Beams = 1
    num_beam_groups: Beams = 1
    diversity_penalty: Weight = 0.0
    num_samples: Annotated[int, Range(min=0, max=4096)] = 0
    temperature: Temperature = 1.0
    top_k: Annotated[int, Range(min=0, max=10**7)] = 0
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    typical_p: Annotated[float, Range(above=0, max=1)] = 1.0
    no_repeat_ngram_size: Annotated[int, Range(min=0, max=16384)] = 0
    block_trigrams: Weight = 0.0
    remove_bad_endings: bool = False


@dataclass
class RetrievalConfig:
    """The dual encoder of ``retrieval``, or under which captions find their image (docs/evaluation.md).

    Args:
        backbone: folder or name of the encoder, as for CLIP-based rewards (docs/clipscore.md); ``evaluate``: null
            computes no recall.
        pretrained: with the name of an architecture: a tag such as ``openai``, or a checkpoint file.
        kwargs: further options of it, such as ``{device: cuda, precision: fp16, cache_dir: FOLDER}``.
    """

    backbone: str | None = None
    pretrained: str | None = None
    kwargs: dict = field(default_factory=dict)


@dataclass
class EvaluateConfig(TrustConfig):
    """``evaluate``: captions of a split, or of a file, against references.

    Args:
        model: folder of a saved captioner, such as ``runs/NAME/export/best``, or the name of a model on the hub.
        models: several captioners with one vocabulary, instead of ``model``: they decode one caption together.
        ensemble: what of ``models`` is averaged at every token: ``probabilities`` or ``log_probabilities``.
        prompt: what a model of Transformers goes on from; null is the prompt that it was exported with, or none.
        predictions: captions in COCO result format, instead of ``model``.
        references: file of references, where ``predictions`` do not belong to a split of ``data``.
        data: images and captions.
        split: of ``data``, or of ``references`` that have splits (Karpathy JSON); null is ``test``, and all images of
            references without splits.
        decode: greedy, beam search or samples.
        rerank: what chooses among several captions of an image: ``consensus`` (the one most similar to the others), or
            a reward that needs no references, of this package or ``package.module:Class``; null takes the first.
        rerank_kwargs: arguments of ``rerank``.
        candidates: write all captions of an image with their scores to ``candidates.jsonl``, and how diverse they are
            and what the best of them would score to ``candidates_scores.json``.
        compare: two files of captions in COCO result format, instead of ``model``: a paired test between them.
        metrics: bleu, meteor, rouge, cider, spice: a list, or names with commas.
        tokenizer: ``java`` (the toolkit's), ``python`` (ours), ``unicode`` or ``char`` (as ``data.tokenizer``),
            ``none`` (of text that is tokenised already: split at spaces, nothing lower-cased or removed), or ``auto``,
            that of ``data.tokenizer``, where ``ptb`` is ours, and Java for odd captions.
        spice_jars: folder with the two jars of SPICE's parser (docs/evaluation.md).
        bootstrap: resamples of images for the 95 % intervals and for the paired test; 0 computes no intervals.
        seed: of the resamples, and of sampled captions.
        judges: heading to a reward whose mean is one more metric, such as CLIPScore (docs/evaluation.md).
        chair: arguments of the reward ``chair`` (docs/rewards.md) but ``measure``, such as ``{synonyms: FILE, objects:
            FILE}``: hallucinated objects, CHAIR-i and CHAIR-s; empty computes none.
        retrieval: recall of their image by captions, and by references.
        out: folder for ``predictions.json`` and ``scores.json``.
        report: write ``report.html`` there, too (docs/report.md).
    """

    model: str | None = None
    models: list[str] = field(default_factory=list)
    ensemble: Literal["probabilities", "log_probabilities"] = "probabilities"
    prompt: str | None = None
    predictions: str | None = None
    references: str | None = None
    compare: list[str] = field(default_factory=list)
    data: DataConfig = field(default_factory=DataConfig)
    split: str | None = None
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    rerank: str | None = None
    rerank_kwargs: dict = field(default_factory=dict)
    candidates: bool = False
    metrics: list[str] | str = field(default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"])
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    spice_jars: str | None = None
    bootstrap: Resamples = 1000
    seed: Seed = 0
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    chair: dict = field(default_factory=dict)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    out: str = "evaluation"
    report: bool = False
