"""The table of programs. A program's modules are imported when it runs."""

from importlib.util import find_spec
from typing import NamedTuple


class Program(NamedTuple):
    """A program of the command line."""

    summary: str
    function: str
    """``module:name``: takes the configuration, or the arguments where there is none;
    returns an exit code, a text to print, or anything else for success.
    """
    config: str | None = None
    """``module:Name`` of the configuration class."""
    parses: bool = False
    """Whether the function takes the parser of configurations, too, as its second argument."""
    trains: bool = False
    """Whether it is one training, in a run folder."""
    processes: bool = True
    """Whether a launcher may start several processes of it."""
    deepspeed: bool = True
    """Whether it may train under DeepSpeed."""
    modules: tuple[str, ...] = ()
    """Optional modules that it imports, whatever its configuration."""


CORE = {
    "run": Program(
        "a pipeline: programs one after the other; run demo is the whole job in small",
        "rl_caption.cli.pipeline:main",
    ),
    "xe": Program(
        "train a captioner by cross-entropy",
        "rl_caption.programs.train:train_xe",
        "rl_caption.config.schema:XeConfig",
        trains=True,
    ),
    "scst": Program(
        "fine-tune a captioner by self-critical sequence training",
        "rl_caption.programs.train:train_scst",
        "rl_caption.config.schema:ScstConfig",
        trains=True,
    ),
    "reward_model": Program(
        "train a model that scores captions: contrastive, or distilled",
        "rl_caption.reward_models.program:train_reward_model",
        "rl_caption.config.reward_models:RewardModelConfig",
        trains=True,
        deepspeed=False,
    ),
    "evaluate": Program(
        "judge captions of a split or of a file",
        "rl_caption.programs.evaluate:evaluate",
        "rl_caption.config.commands:EvaluateConfig",
    ),
    "score": Program(
        "score captions in files with any reward",
        "rl_caption.programs.score:main",
        "rl_caption.config.commands:ScoreConfig",
    ),
    "caption": Program(
        "caption photos with a trained captioner",
        "rl_caption.programs.caption:caption",
        "rl_caption.config.commands:CaptionConfig",
    ),
    "ablate": Program(
        "compare rewards: a grid of self-critical runs from one checkpoint",
        "rl_caption.programs.ablation.runner:run_ablation",
        "rl_caption.programs.ablation.config:AblateConfig",
        parses=True,
        processes=False,
    ),
    "report": Program(
        "a page of a run, or of one or several evaluations",
        "rl_caption.programs.report.page:main",
        "rl_caption.config.commands:ReportConfig",
    ),
    "grpo_vlm": Program(
        "fine-tune a vision-language model with TRL's GRPO or RLOO trainer",
        "rl_caption.integrations.trl.program:fine_tune",
        "rl_caption.integrations.trl.config:GrpoVlmConfig",
        modules=("trl",),
    ),
    "serve": Program(
        "a reward behind HTTP, for the workers of other frameworks",
        "rl_caption.integrations.server:serve",
        "rl_caption.integrations.config:ServeConfig",
        modules=("fastapi", "uvicorn"),
    ),
    "configs": Program(
        "the recipes that the package brings: list, show NAME",
        "rl_caption.cli.configs:main",
    ),
    "doctor": Program(
        "versions, devices, what is missing and what that costs",
        "rl_caption.cli.preflight:main",
    ),
    "prepare_coco": Program(
        "COCO captions: the counts of Karpathy's splits",
        "rl_caption.data.prepare_coco:main",
        "rl_caption.config.commands:PrepareCocoConfig",
    ),
    "prepare_features": Program(
        "region features: published files unpacked, or photos encoded",
        "rl_caption.data.prepare_features:main",
        "rl_caption.config.commands:PrepareFeaturesConfig",
    ),
}
LAB = {
    "judge": Program(
        "how well metrics agree with human judgements of captions",
        "rl_caption.lab.meta_evaluation.program:compare_with_people",
        "rl_caption.lab.config:JudgeSetConfig",
    ),
    "reproduce": Program(
        "a table of one of the five papers: published and measured values side by side",
        "rl_caption.lab.reproduce.program:main",
        "rl_caption.lab.config:ReproduceConfig",
    ),
    "retrieval": Program(
        "how well dual encoders find the captions of images, and the images of captions",
        "rl_caption.lab.retrieval:compare_retrieval",
        "rl_caption.lab.config:CompareRetrievalConfig",
    ),
    "specificity": Program(
        "how often metrics pay for one more true detail, and for a false one less",
        "rl_caption.lab.meta_evaluation.specificity:measure_rates",
        "rl_caption.lab.config:SpecificityRatesConfig",
    ),
    "curate": Program(
        "rank and filter the captions of a data set by rules and scores",
        "rl_caption.lab.curate:curate",
        "rl_caption.lab.config:CurateConfig",
        modules=("pandas",),
    ),
    "recaption": Program(
        "write a new, long caption of every image of a data set",
        "rl_caption.lab.recaption:recaption",
        "rl_caption.lab.config:RecaptionConfig",
    ),
    "positives": Program(
        "write captions of images, and images of captions, for PAC-S to learn from",
        "rl_caption.lab.recaption:make_positives",
        "rl_caption.lab.config:PositivesConfig",
    ),
    "negatives": Program(
        "write false captions of a data set with a language model",
        "rl_caption.lab.recaption:write_negatives",
        "rl_caption.lab.config:WriteNegativesConfig",
    ),
    "concreteness": Program(
        "concreteness of captions: scores, their combination, targets for a student",
        "rl_caption.lab.concreteness:make_targets",
        "rl_caption.lab.config:ConcretenessConfig",
        modules=("pandas",),
    ),
    "web": Program(
        "caption photos in a page in the browser, by several captioners side by side",
        "rl_caption.lab.web:serve",
        "rl_caption.lab.config:WebConfig",
        modules=("gradio",),
    ),
    "share": Program(
        "a trained model with its model card, in a folder or on the Hugging Face hub",
        "rl_caption.lab.share:share",
        "rl_caption.lab.config:ShareConfig",
    ),
}
"""Programs of ``rl_caption.lab``, which the core names nowhere else."""
PROGRAMS = CORE | LAB if find_spec("rl_caption.lab") else CORE
"""All programs; without ``LAB`` where the lab is not installed."""
