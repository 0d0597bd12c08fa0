"""Every test runs offline, and on one thread: the numbers repeat and test processes can share the cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402  (reads OMP_NUM_THREADS when it is imported)

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    """A folder with the untrained model that TRL's runs start from; read only."""
    from tests.trl import tiny

    return tiny.save_model(tmp_path_factory.mktemp("model"))
