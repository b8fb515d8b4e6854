"""Convert the budgets that Tangram's authors published into profiles.

Their file (aiha-lab/tangram, Apache-2.0; arXiv 2606.06302) is an `.npz` of arrays
`MODEL/SCORER/SCOPE/FIELD`. `mean` and `std` [L, H] are the kept fraction of the entries that
competed at ρ 0.3; `layers` is [L]. Only the ratios between heads carry over. Counts are derived for
the requested ρ, as for any profile, with the paper's α.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tangram.compress.profile import PAPER_ALPHA, Profile, ProfileOptions
from tangram.compress.provenance import Calibration, ModelFingerprint, ScorerSpec
from tangram.config import Scope
from tangram.errors import ProfileError
from tangram.foreign_files import refuse_irregular

SAMPLES = 28
SOURCE = (
    "aiha-lab/tangram, Apache-2.0, 28 samples of 14.6K-26.3K tokens at rho 0.3, arXiv 2606.06302"
)

# Our scorer -> theirs.
SCORERS = {
    "snapkv": "snapkv",
    "keydiff": "keydiff",
    "expected_attention": "ea",
    "fastkvzip": "fastkvzip",
}

# The file has no geometry beyond L and H: this is that of the models' published configurations.
MODELS = {
    "llama-3.1-8b-instruct": ModelFingerprint(
        "meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 8, 32, 128
    ),
    "qwen3-4b-instruct-2507": ModelFingerprint(
        "Qwen/Qwen3-4B-Instruct-2507", "qwen3", 36, 8, 32, 128
    ),
    "gemma-3-12b-it": ModelFingerprint("google/gemma-3-12b-it", "gemma3_text", 48, 8, 16, 256),
    "gpt-oss-20b": ModelFingerprint("openai/gpt-oss-20b", "gpt_oss", 24, 8, 64, 64),
}


def import_published(
    path: str | Path,
    model: str,
    scorer: ScorerSpec,
    scope: Scope,
    kv_retention: float,
    *,
    chunk_tokens: int = 2048,
    page_tokens: int = 16,
    heads_per_page: int = 4,
) -> Profile:
    """The profile of a published budget, for one of `MODELS` and `SCORERS` (our names).

    `scorer` carries the parameters of the scorer that will run; those of the authors are unknown.
    The weights' hash and the vocabulary are unknown too, so it fits any model of that architecture
    and shape. Raises `ProfileError` naming the file and what it lacks, `ConfigError` if ρ cannot be
    met.
    """
    if model not in MODELS:
        raise ProfileError(
            f"model is {model!r}, there are published budgets of {', '.join(MODELS)}"
        )
    if scorer.name not in SCORERS:
        raise ProfileError(
            f"scorer is {scorer.name!r}, there are published budgets of {', '.join(SCORERS)}"
        )
    mean, std, layers = _arrays(path, f"{model}/{SCORERS[scorer.name]}/{scope}")
    options = ProfileOptions(
        MODELS[model],
        [int(layer) for layer in layers],
        scorer,
        scope,
        chunk_tokens,
        page_tokens,
        heads_per_page,
        alpha=PAPER_ALPHA,
    )
    return Profile.from_statistics(mean, std, options, kv_retention, Calibration(SAMPLES, SOURCE))


def _arrays(path: str | Path, prefix: str) -> list[npt.NDArray[np.generic]]:
    try:
        refuse_irregular(path)
        # Opened here, because np.load does not close a file that it cannot read.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as published:
            return [published[f"{prefix}/{name}"] for name in ("mean", "std", "layers")]
    except KeyError as error:
        raise ProfileError(
            f"{path}: {error.args[0]}; its keys must be MODEL/SCORER/SCOPE/FIELD"
        ) from error
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ProfileError(f"{path}: not a readable .npz file of budgets: {error}") from error
