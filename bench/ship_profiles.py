"""Calibrate the embedded model and write the profiles that ship with the project.

python -m bench.ship_profiles [--scorer keydiff] [--scope model] [--samples 50] [--folder
tangram/profiles] [--scales-only]

With --scales-only the profiles of the folder keep their budgets and get scales for an FP8 cache.
These do not depend on the scorer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tangram.calibrate.measure import Magnitudes
from tangram.calibrate.texts import make_texts
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig
from tangram.engine.observe import score_source
from tangram.engine.profiles import calibrate_model
from tangram.model.load import load_model

RETENTIONS = (0.25, 0.5, 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scorer", default="keydiff")
    parser.add_argument("--scope", default="model", choices=("layer", "model"))
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("tangram/profiles"))
    parser.add_argument("--scales-only", action="store_true")
    parser.add_argument("--min-characters", type=int, default=8000, help="of a text")
    options = parser.parse_args()
    if options.scales_only:
        texts = make_texts(options.samples, min_characters=options.min_characters)
        measure_scales(texts, options.folder)
        return
    config = EngineConfig()
    loaded = load_model(config.model)
    profiles = calibrate_model(
        loaded,
        make_scorer(options.scorer, model=loaded.fingerprint),
        options.scope,
        config,
        retentions=RETENTIONS,
        texts=make_texts(options.samples, min_characters=options.min_characters),
        source=f"built-in pilot texts, {options.samples} samples, seed 0",
    )
    for profile in profiles:
        profile.save(options.folder / profile.file_name)
        print(
            f"{profile.file_name}: realised {profile.realised_retention:.4f}, "
            f"{profile.calibration.rank_stability}"
        )


def measure_scales(texts: Sequence[str], folder: Path) -> None:
    """Give the profiles of the embedded model in `folder` the scales that suit `texts`."""
    config, found = EngineConfig(), Magnitudes()
    loaded = load_model(config.model)
    scores = score_source(
        loaded, make_scorer("keydiff"), chunk_tokens=config.chunk_tokens, magnitudes=found
    )
    for number, text in enumerate(texts):
        chunks = sum(1 for _ in scores(loaded.tokenizer.encode(text)))
        print(f"text {number + 1} of {len(texts)}: {chunks} chunks", flush=True)
    for path in sorted(folder.glob(f"{config.model}.*.json")):
        profile = Profile.load(path)
        profile.with_scales(found.scales()).save(path)
        print(path.name)


if __name__ == "__main__":
    main()
