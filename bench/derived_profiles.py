"""How near derived profiles come to measured ones: `python -m bench.derived_profiles`.

Each ratio of which a profile ships for the embedded model is derived of the other ratios. Prints,
for each ratio, the share of pages that another head has, least and most over scorers and chunks.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from tangram.compress.between import derive_profile
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile


def measure_moved_pages(one: Profile, other: Profile) -> float:
    """The share of pages that another head has."""
    ours, theirs = _head_pages(one), _head_pages(other)
    return sum(abs(ours[head] - theirs[head]) for head in ours) / 2 / sum(ours.values())


def _head_pages(profile: Profile) -> dict[tuple[int, int], int]:
    pairs = zip(profile.groups, profile.sealed_pages, strict=True)
    return {head: pages for group, pages in pairs for head in group}


def main() -> None:
    """Print the table of docs/calibration.md."""
    files = sorted(find_shipped_profiles().glob("smollm2.*.json"))
    found = defaultdict[tuple[float, tuple[float, ...]], list[tuple[float, float]]](list)
    for _, group in groupby(map(Profile.load, files), lambda one: (one.scorer, one.chunk_tokens)):
        known = {profile.kv_retention: profile for profile in group}
        for ratio, profile in known.items():
            shape = {"page_tokens": profile.page_tokens, "heads_per_page": profile.heads_per_page}
            others = [other for other in known.values() if other is not profile]
            nearest = min(others, key=lambda one: abs(one.kv_retention - ratio))
            used = (
                max((one.kv_retention for one in others if one.kv_retention < ratio), default=0),
                min((one.kv_retention for one in others if one.kv_retention > ratio), default=1),
            )
            pair = (
                measure_moved_pages(profile, derive_profile(others, ratio, **shape)),
                measure_moved_pages(profile, derive_profile([nearest], ratio, **shape)),
            )
            found[ratio, tuple(one for one in used if 0 < one < 1)].append(pair)
    print(
        "| ρ | derived of | pages that move | with the nearest shares alone |\n|---|---|---:|---:|"
    )
    for (ratio, parents), pairs in sorted(found.items()):
        spans = [f"{100 * min(row):.1f}–{100 * max(row):.1f}" for row in zip(*pairs, strict=True)]
        print(f"| {ratio} | {' and '.join(map(str, parents))} | {' | '.join(spans)} |")


if __name__ == "__main__":
    main()
