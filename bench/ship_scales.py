"""Give the shipped profiles of the embedded model the scales of an FP8 cache, and keep the rest.

python -m bench.ship_scales [--samples 8] [--min-characters 3600] [--folder tangram/profiles]

Scales depend on keys and values alone, so profiles of all scorers and chunk sizes have the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tangram.calibrate.measure import Magnitudes
from tangram.calibrate.texts import QUICK_SAMPLES, make_texts
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig
from tangram.engine.setup.observe import score_source
from tangram.model.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=QUICK_SAMPLES)
    parser.add_argument("--min-characters", type=int, default=3600)
    parser.add_argument("--folder", type=Path, default=Path("tangram/profiles"))
    options = parser.parse_args()
    config, found = EngineConfig(), Magnitudes()
    loaded = load_model(config.model)
    scores = score_source(
        loaded, make_scorer("keydiff"), chunk_tokens=config.chunk_tokens, magnitudes=found
    )
    texts = make_texts(options.samples, min_characters=options.min_characters)
    for number, text in enumerate(texts):
        chunks = sum(1 for _ in scores(loaded.tokenizer.encode(text)))
        print(f"text {number + 1} of {len(texts)}: {chunks} chunks", flush=True)
    for path in sorted(options.folder.glob(f"{config.model}.*.json")):
        Profile.load(path).with_scales(found.scales()).save(path)
        print(path.name)


if __name__ == "__main__":
    main()
