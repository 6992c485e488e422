"""The program ``grpo_vlm``: TRL's trainers on this package's rewards and data, then this package's
evaluation.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import release_memory
from tqdm.auto import tqdm
from transformers import GenerationConfig, PrinterCallback, TrainerCallback
from transformers.utils import flatten_dict

from rewards.mixed import MixedReward
from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner, weights_hash
from rl_caption.captioners.vlm import special_tokens
from rl_caption.config.build import (
    build_data,
    build_reward,
    checked_splits,
    quiet_libraries,
    references_of,
    usable_split,
)
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.data.fingerprint import TIMES, fingerprint
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import (
    Evaluation,
    check_writable,
    evaluate_rows,
    format_table,
    write_evaluation,
)
from rl_caption.evaluation.metrics import (
    add_judges,
    check_asked,
    check_judges,
    metrics_tokenizer,
    words_tokenizer,
)
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.integrations.trl.model import (
    adapters,
    check_vllm_prompt,
    load_vlm,
    load_weights,
    prompt_once,
    skip_epochs,
    suppression,
    vllm_in_float32,
)
from rl_caption.integrations.trl.rows import FinishedAware, trl_dataset
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.engines import accelerator_kwargs, print_main, usable_precision, use_cpu
from rl_caption.runtime.errors import ConfigError, UserError, config_errors, naming
from rl_caption.runtime.launch import check_environment, check_processes, run_lock
from rl_caption.runtime.zero import gathered_parameters
from rl_caption.training.checkpoint import CheckpointError, new_folder
from rl_caption.training.run import CHECKED_IMAGES, NonFiniteError
from rl_caption.training.run_folder import (
    FREE_TO_CHANGE,
    RESULT,
    append_line,
    drop_after,
    is_complete,
    plain,
    write_run_files,
)
from rl_caption.training.validation import decode_candidates

INPUTS = "inputs.json"
"""File of a checkpoint that says what the run was trained on: configuration, reward, data, model.
"""
MOST_DIFFERENCE = 0.02
"""Largest mean difference, in nats, of the log-probabilities by which vLLM samples and TRL scores
in float32.
"""


class WrongSamplesError(UserError, RuntimeError):
    """vLLM samples from other prompts than those that are scored; the message has the difference."""


def trl_arguments(config: GrpoVlmConfig) -> Any:
    """``GRPOConfig`` or ``RLOOConfig`` with the arguments of ``trl`` and those that follow from
    other keys.

    Raises ConfigError for what TRL does not know or refuses, and for arguments that other keys set.
    """
    from trl import GRPOConfig, RLOOConfig

    given = config.trl
    ours = {
        "output_dir": str(Path(config.run.dir) / "checkpoints"),
        "reward_weights": [term.weight for term in config.reward.terms.values()],
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,
    }
    if double := sorted(ours.keys() & given.keys()):
        raise ConfigError(f"trl has {double}: other keys of this configuration set them")
    defaults: dict[str, Any] = {
        # First the function, which also keeps DeepSpeed from compiling an extension on a CPU.
        "use_cpu": "cpu" in accelerator_kwargs()
        or torch.accelerator.current_accelerator(check_available=True) is None,
        "disable_dropout": True,
        "logging_first_step": True,
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if not {"bf16", "fp16"} & given.keys():
        defaults["bf16"] = usable_precision("auto") == "bf16"
    trl_class: Any = GRPOConfig if config.trainer == "grpo" else RLOOConfig
    with config_errors("TRL refuses trl"):
        arguments = trl_class(**defaults | given | ours)
    if arguments.n_gpu > 1:  # Transformers would choose DataParallel, which TRL refuses
        arguments._n_gpu = 1
    return arguments


@contextmanager
def unsharded_models(arguments: Any) -> Iterator[None]:
    """Inside, Transformers loads and decodes models as without ZeRO-3.

    With it, a model forgets the names of its weights in files, and processes decode equally often,
    or wait for ever.
    """
    from transformers.integrations.deepspeed import (
        set_hf_deepspeed_config,
        unset_hf_deepspeed_config,
    )

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if arguments.deepspeed_plugin is not None:
            set_hf_deepspeed_config(arguments.deepspeed_plugin.dschf)


def find_checkpoint(
    folder: Path, inputs: Mapping[str, Any], resume: bool
) -> tuple[int, Path | None]:
    """The newest intact checkpoint and its step; 0 and None to start. One that a kill cut off is
    passed over.

    Raises CheckpointError where there is one and ``resume`` is false, or it is of another run.
    """
    intact = [path for path in folder.glob("checkpoints/checkpoint-*") if damage(path) is None]
    if not intact:
        return 0, None
    step, newest = max((int(path.name.split("-")[1]), path) for path in intact)
    if not resume:
        raise CheckpointError(
            f"{folder} holds a run and run.resume is false: choose another run.dir"
        )
    before = read_json(newest / INPUTS, CheckpointError)
    changed = [key for key in {**before, **inputs} if before.get(key) != inputs.get(key)]
    if changed:
        said = "; ".join(f"{key}: {before.get(key)} -> {inputs.get(key)}" for key in changed)
        raise CheckpointError(
            f"{newest} was trained with other inputs: {said}. Choose another run.dir"
        )
    return step, newest


def fine_tune(config: GrpoVlmConfig) -> str:
    """Train, export to ``export/last``, evaluate; return the table of scores, which only the main
    process has.

    Raises:
        ConfigError, DataError, CheckpointError, LaunchError, EvaluationError, RewardError,
            NonFiniteError: what is wrong, and what would be right.
    """
    check_environment()
    quiet_libraries()
    # TRL calls Transformers by deprecated names, at every step.
    warnings.filterwarnings("ignore", r".*gradient_checkpointing", FutureWarning)
    # Before PartialState: these arguments choose the device and initialise the process group.
    arguments = trl_arguments(config)
    state: Any = PartialState()
    check_processes(state.num_processes, config.train.num_processes)
    if state.device.type == "cpu":
        use_cpu(state.num_processes, config.train.threads)
    folder = Path(config.run.dir)
    with run_lock(config.run.dir) if state.is_main_process else nullcontext():
        with unsharded_models(arguments):
            load_vlm(config.model, weights=False)  # refused before the data are read
        data, split = build_data(config.data), config.eval.split
        splits = dict.fromkeys(usable_split(data, name) for name in ("train", split or "train"))
        rows = checked_splits(config.data, data, list(splits), state, folder / CHECKED_IMAGES)
        with state.main_process_first():
            texts = references_of(rows["train"])
            reward = build_reward(config.reward, texts, folder, config.data.tokenizer)
        inputs = inputs_of(config, reward, rows["train"])
        start, checkpoint = find_checkpoint(folder, inputs, config.run.resume)
        if checkpoint is not None and is_complete(folder):
            print_main(state, f"{folder} is complete: remove it, or choose another run.dir")
            return ""
        return Run(config, arguments, rows, reward, inputs).finish(start, checkpoint)


def inputs_of(config: GrpoVlmConfig, reward: MixedReward, rows: Sequence[Row]) -> dict[str, Any]:
    """What a run that goes on must have as before, as JSON has it."""
    settings = flatten_dict(plain(config))
    inputs = {key: value for key, value in settings.items() if not key.startswith(FREE_TO_CHANGE)}
    inputs |= {"reward": reward.signature, "weights": weights_hash(str(config.model.init))}
    data = fingerprint({"train": rows})
    return inputs | {name: value for name, value in data.items() if not name.endswith(TIMES)}


class Run:
    """A run whose data and reward are read; making it loads the model and makes TRL's trainer."""

    def __init__(
        self,
        config: GrpoVlmConfig,
        arguments: Any,
        rows: Mapping[str, Sequence[Row]],
        reward: MixedReward,
        inputs: Mapping[str, Any],
    ) -> None:
        self.config, self.arguments, self.rows, self.reward = config, arguments, rows, reward
        self.folder, self.state = Path(config.run.dir), cast(Any, PartialState())
        options, split = config.eval, config.eval.split
        self.judges: dict[str, Any] = {}
        if self.state.is_main_process and split is not None:
            check_writable(self.folder / "eval")
            check_asked(options.metrics, options.tokenizer)
            words = words_tokenizer(options.tokenizer, config.data.tokenizer)
            texts = references_of(rows[split])
            self.judges = build_judges(options.judges, None, texts, "eval.judges", words)
            check_judges(self.judges, rows[split], f"split {split!r}")
        with unsharded_models(arguments):
            self.captioner = load_vlm(config.model)
        model = self.captioner.policy.model
        # ``generate`` takes what it is not told from the model's own settings: a ban on repeated
        # words, say.
        self.settings = model.generation_config
        ends, unwritten = special_tokens(self.captioner.processor, model)
        model.generation_config = GenerationConfig(eos_token_id=ends)
        self.trainer = self._trainer(ends, unwritten, inputs)

    def _trainer(self, ends: list[int], unwritten: list[int], inputs: Mapping[str, Any]) -> Any:
        from trl import GRPOTrainer, RLOOTrainer

        config, arguments, captioner = self.config, self.arguments, self.captioner
        colocated = arguments.use_vllm and arguments.vllm_mode == "colocate"
        if colocated:
            check_vllm_prompt(captioner, self.rows["train"][0])
        # Instead of TRL's own, which suppresses the image token only.
        mode = arguments.vllm_mode if arguments.use_vllm else None
        suppressed = suppression(unwritten, len(captioner.tokenizer), mode)
        arguments.generation_kwargs = suppressed | (arguments.generation_kwargs or {})
        trainer_class: Any = GRPOTrainer if config.trainer == "grpo" else RLOOTrainer
        lora = adapters(captioner, config.model)
        terms = self.reward.rewards.items()
        exact = colocated and not (arguments.bf16 or arguments.fp16)
        refusals = (ValueError, ImportError, NotImplementedError)
        with (
            naming("TRL refuses this configuration", refusals),
            vllm_in_float32() if exact else nullcontext(),
        ):
            trainer = trainer_class(
                model=captioner.policy.model,
                reward_funcs=[FinishedAware(reward, ends, name) for name, reward in terms],
                args=arguments,
                train_dataset=trl_dataset(self.rows["train"], captioner.prompt),
                processing_class=captioner.processor,
                callbacks=[Log(self.folder / "metrics.jsonl", self.reward, inputs)],
                peft_config=lora,
            )
        if colocated:
            prompt_once(trainer, captioner.policy.config.image_token_id)
        trainer.remove_callback(PrinterCallback)  # prints every value, without a unit
        return trainer

    def finish(self, start: int, checkpoint: Path | None) -> str:
        """Train from the step ``start``, export, evaluate before and after; return the table of
        scores.
        """
        accelerator, split = self.trainer.accelerator, self.config.eval.split
        tables: dict[str, Evaluation | None] = {}
        if split is not None and self.config.eval.before and checkpoint is None:
            name = f"{split}-before"
            tables[name] = self._evaluate(self.captioner, name, accelerator)
        if self.state.is_main_process:
            (self.folder / RESULT).unlink(missing_ok=True)
            extra = {"reward": self.reward.signature, "num_processes": self.state.num_processes}
            write_run_files(self.folder, plain(self.config), extra)
            drop_after(self.folder / "metrics.jsonl", start if checkpoint else -1)
        step = self._train(start, checkpoint)
        export = self.folder / "export" / "last"
        sharded = self.trainer.deepspeed is not None  # not so where all steps were taken before
        with (
            gathered_parameters(accelerator, self.trainer.model_wrapped)
            if sharded
            else nullcontext()
        ):
            if self.state.is_main_process:
                self._export(export)
        self.state.wait_for_everyone()
        del self.trainer, self.captioner
        release_memory()
        if split is not None:
            with unsharded_models(self.arguments):
                exported: Any = load_captioner(export)
            tables[split] = self._evaluate(exported, split, accelerator)
        if not self.state.is_main_process:
            return ""
        write_json(self.folder / RESULT, {"step": step, "reward": self.reward.signature})
        return format_table(cast(dict[str, Evaluation], tables)) if tables else ""

    def _train(self, start: int, checkpoint: Path | None) -> int:
        """Train, or resume and train, to the end; return the last optimizer step."""
        trainer = self.trainer
        if checkpoint is not None:
            if self.config.model.lora is None:
                trainer._load_from_checkpoint = partial(load_weights, trainer.model)
            loader = trainer.get_train_dataloader()
            counts = trainer.set_initial_training_values(self.arguments, loader)
            if start >= counts[-1]:  # train() would make one more step
                with_adapters = self.config.model.lora is not None
                if with_adapters and not (checkpoint / "zero_to_fp32.py").is_file():
                    trainer._load_from_checkpoint(str(checkpoint))
                else:
                    load_weights(trainer.model, checkpoint)
                return start
            skip_epochs(trainer, start // counts[1])
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return int(trainer.state.global_step)

    def _export(self, folder: Path) -> None:
        """Write a plain model, adapters merged in float32, with its processor and the prompt."""
        policy = self.captioner.policy
        policy.model.generation_config = self.settings
        with new_folder(folder, replaces=True) as partial_folder:
            self.captioner.save_pretrained(policy, partial_folder)

    def _evaluate(self, captioner: Any, name: str, accelerator: Any) -> Evaluation | None:
        """Caption the split; in the main process, compute metrics and write both to ``eval/NAME``."""
        options, rows = self.config.eval, self.rows[str(self.config.eval.split)]
        print_main(self.state, f"captioning {len(rows)} images of {options.split!r}")
        decoding = Decoding(
            num_beams=options.num_beams,
            max_new_tokens=self.arguments.max_completion_length,
            batch_size=options.batch_size,
        )
        captioner.policy.to(self.state.device)
        # In the precision of the training; judges score in their own.
        with unsharded_models(self.arguments):
            found = decode_candidates(
                captioner, captioner.policy, rows, decoding, accelerator, "captioning"
            )
        if not self.state.is_main_process:
            return None
        captions = {image_id: texts[0].caption for image_id, texts in found.items()}
        evaluation = evaluate_rows(
            rows,
            list(captions.values()),
            metrics=options.metrics,
            tokenizer=metrics_tokenizer(options.tokenizer, self.config.data.tokenizer),
            training_captions={text for row in self.rows["train"] for text in row["references"]},
        )
        evaluation = add_judges(evaluation, rows, captions, self.judges)
        write_evaluation(evaluation, captions, self.folder / "eval" / name)
        settings = {
            "data": plain(self.config.data),
            "split": options.split,
            "weights": weights_hash(captioner.name),
        }
        write_json(self.folder / "eval" / name / "settings.json", settings)
        return evaluation


class Log(TrainerCallback):
    """Appends what TRL logs to ``metrics.jsonl``, prints it, and ends a run whose numbers are
    wrong.
    """

    def __init__(self, path: Path, reward: MixedReward, inputs: Mapping[str, Any]) -> None:
        self.path, self.reward, self.inputs = path, reward, inputs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what the run was trained on, and a manifest, into the checkpoint that was just
        saved.
        """
        PartialState().wait_for_everyone()  # every process writes files
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(checkpoint / INPUTS, self.inputs)
            write_json(checkpoint / MANIFEST, manifest_of(checkpoint))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Log, print and check the trainer's values."""
        values = dict(logs or {})
        if "loss" not in values:  # the totals after the last step
            return
        if state.is_world_process_zero:
            append_line(self.path, {"step": state.global_step, **values})
            said = f"step {state.global_step}/{state.max_steps}  {self._line(values)}"
            tqdm.write(said, file=sys.stderr)
        if not math.isfinite(values["loss"]):
            raise NonFiniteError(
                f"loss is {values['loss']} at step {state.global_step}: lower trl.learning_rate"
            )
        difference = values.get("sampling/sampling_logp_difference/mean", 0.0)
        if difference > MOST_DIFFERENCE and not (args.bf16 or args.fp16):
            raise WrongSamplesError(
                f"the log-probabilities by which vLLM samples and TRL scores differ by "
                f"{difference:.3g} nats on average "
                f"at step {state.global_step} (at most {MOST_DIFFERENCE} is rounding): of other "
                f"prompts, or in another precision"
            )

    def _line(self, values: dict[str, Any]) -> str:
        terms = [
            f"{name} {values[f'rewards/{name}/mean']:.4g} ({term.bounds[0]:g} to "
            f"{term.bounds[1]:g})"
            for name, term in self.reward.rewards.items()
        ]
        length, clipped = values["completions/mean_length"], values["completions/clipped_ratio"]
        return "  ".join([*terms, f"length {length:.1f} tokens", f"without EOS {clipped:.0%}"])
