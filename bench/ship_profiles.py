"""Calibrate the embedded model and write the profiles that ship with the project.

python bench/ship_profiles.py [--scorer keydiff] [--scope model] [--samples 50] [--folder
tangram/profiles]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tangram.calibrate.texts import make_texts
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig
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
    options = parser.parse_args()
    config = EngineConfig()
    loaded = load_model(config.model)
    profiles = calibrate_model(
        loaded,
        make_scorer(options.scorer, model=loaded.fingerprint),
        options.scope,
        config,
        retentions=RETENTIONS,
        texts=make_texts(options.samples),
        source=f"built-in pilot texts, {options.samples} samples, seed 0",
    )
    for profile in profiles:
        profile.save(options.folder / profile.file_name)
        print(
            f"{profile.file_name}: realised {profile.realised_retention:.4f}, "
            f"{profile.calibration.rank_stability}"
        )


if __name__ == "__main__":
    main()
