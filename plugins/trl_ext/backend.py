"""The back end `trl` of the command: from a recipe to a trained model."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PrinterCallback
from trl.trainer.utils import create_model_from_path

from trimtab.backends import RunRequest, RunResult
from trimtab.errors import TrimtabError
from trimtab.recipe import Recipe
from trl_ext.config import TrimtabConfig
from trl_ext.data import drop_long_prompts, load_prompts
from trl_ext.evaluate import greedy_accuracy
from trl_ext.logs import RecordSteps
from trl_ext.resume import last_checkpoint
from trl_ext.rewards import accuracy_function
from trl_ext.trainer import TrimtabGRPOTrainer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def run(request: RunRequest) -> RunResult:
    """Train a recipe through TRL; continues from the last whole checkpoint in the run's folder.

    Raises:
        TrimtabError: something that the recipe asks for cannot be had here.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what fails is said once, by our own message
    datasets.disable_progress_bars()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise TrimtabError("back end trl: `trimtab run` is one process; for several, launch a script (docs/trl.md)")
    recipe = request.recipe
    tokenizer = _readable(request.model, _tokenizer)
    _check_engine(recipe, request.model)
    evaluation = _prompts(request.evaluation, recipe, tokenizer) if request.evaluation else None
    trainer = TrimtabGRPOTrainer(
        _readable(request.model, _weights),
        args=_arguments(request),
        train_dataset=_prompts(request.train, recipe, tokenizer),
        processing_class=tokenizer,
        callbacks=[RecordSteps(request)],
    )
    trainer.remove_callback(PrinterCallback)
    held_out = _Evaluation(request, trainer, evaluation)
    checkpoint = last_checkpoint(request.folder)
    request.resume(_steps(checkpoint, recipe))
    before = held_out.measure(0) if checkpoint is None else held_out.known(0)
    _train(trainer, checkpoint)
    after = held_out.measure(recipe.training.steps)
    model = request.folder / "model"
    trainer.save_model(str(model))
    return RunResult(model, before, after)


def _train(trainer: Any, checkpoint: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        step = trainer.state.global_step // trainer.recipe.updates_per_step + 1
        raise TrimtabError(
            f"step {step}: the model's weights are not finite, so that nothing can be sampled; lower optimizer.lr and "
            "start anew with --fresh"
        ) from None


class _Evaluation:
    """Held-out accuracy by step, kept in the run's folder so that a resumed run still knows where it began."""

    def __init__(self, request: RunRequest, trainer: Any, rows: Any) -> None:
        self.file = request.folder / "evaluation.json"
        self.trainer, self.size = trainer, trainer.args.per_device_train_batch_size
        self.grade = accuracy_function(request.recipe)
        self.rows = rows if self.grade is not None else None

    def measure(self, step: int) -> float | None:
        if self.rows is None:
            return None
        accuracy = greedy_accuracy(self.trainer, self.rows, self.grade, batch_size=self.size)
        if self.trainer.accelerator.is_main_process:
            scratch = self.file.with_suffix(".part")
            scratch.write_text(json.dumps(self._all() | {str(step): accuracy}, indent=2) + "\n")
            scratch.replace(self.file)
        return accuracy

    def known(self, step: int) -> float | None:
        return self._all().get(str(step))

    def _all(self) -> dict[str, float]:
        return json.loads(self.file.read_text()) if self.file.is_file() else {}


def _arguments(request: RunRequest) -> TrimtabConfig:
    every = request.recipe.training.checkpoint_every
    on_cpu = not torch.cuda.is_available()
    return TrimtabConfig(
        str(request.folder),
        recipe=str(request.recipe_file),
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        gradient_checkpointing=not on_cpu,
        save_strategy="steps" if every else "no",
        save_steps=(every or 1) * request.recipe.updates_per_step,
        save_total_limit=2,  # the one before stays whole while the newest is written
        report_to="none",
        disable_tqdm=True,
    )


def _prompts(source: str, recipe: Recipe, tokenizer: Any) -> Any:
    return drop_long_prompts(load_prompts(source, recipe.data), tokenizer, recipe.data.max_prompt_length)


def _readable(model: str, read: Callable[[str], Any]) -> Any:
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise TrimtabError(f"model: there is no folder {model}")
    try:
        return read(model)
    except Exception as error:  # transformers raises many kinds for a folder or name that it cannot read
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TrimtabError(f"model: {model!r} cannot be read: {reason[:300]}") from None


def _tokenizer(model: str) -> Any:
    AutoConfig.from_pretrained(model)
    return AutoTokenizer.from_pretrained(model, padding_side="left", truncation_side="left")


def _weights(model: str) -> Any:
    """The weights that are trained, in fp32; `precision.train` is that of the forward pass."""
    return create_model_from_path(model, dtype="float32")


def _check_engine(recipe: Recipe, model: str) -> None:
    """Refuse an engine that is not here, and a rollout precision that it would not use."""
    if recipe.rollout.engine == "transformers":
        return
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise TrimtabError(
            "rollout.engine: vllm is not installed; install it, set rollout.engine=transformers, or try --tiny"
        ) from None
    wanted = recipe.precision.rollout
    stored = str(AutoConfig.from_pretrained(model).dtype).removeprefix("torch.")
    if wanted != "auto" and DTYPES[wanted] != stored:
        raise TrimtabError(f"precision.rollout: {wanted} was asked for, but vLLM takes the model's own, {stored}")


def _steps(checkpoint: Path | None, recipe: Recipe) -> int:
    return int(checkpoint.name.rpartition("-")[2]) // recipe.updates_per_step if checkpoint else 0
