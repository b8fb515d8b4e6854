"""Compiled loops of drafts by lookup, over arrays of tokens.

A draft is looked up for every sequence between two steps, while a GPU waits. In Python that took
longer than all else that a step does on the host. All loops are in one file, because Numba's cache
of a function detects changes in that function's file only.
"""

from __future__ import annotations

import numpy as np

from tangram.numba_cache import compile_kept

NONE = -1  # inside the chains only: no older position
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth, volume 3, section 6.4)
_HALF = np.uint64(32)
NOTICE = "compiling drafts by lookup, once on this machine: takes about 5 s"


@compile_kept(error_model="numpy", notice=NOTICE)
def chain_of(first, second, chains):  # type: ignore[no-untyped-def]
    """Which of so many `chains`, a power of two, has the positions of a pair of tokens."""
    pair = np.uint64(first) << _HALF | np.uint64(second)
    return np.int64((pair * _MULTIPLIER) >> _HALF) & (chains - 1)


@compile_kept(error_model="numpy")
def link_positions(tokens, older, newest, starts, begin, end):  # type: ignore[no-untyped-def]
    """Enter the positions [begin, end) of `tokens` [n] in their chains.

    `older` [n] leads from a position to the next older one of its chain, `newest` [chains] to the
    first. The first position of a text, of those that begin at `starts` [texts], ends no pair.
    """
    text = np.searchsorted(starts, begin, "right")
    for position in range(begin, end):
        older[position] = NONE
        if text < len(starts) and starts[text] <= position:
            text += 1
        if position > starts[text - 1]:
            chain = chain_of(tokens[position - 1], tokens[position], len(newest))
            older[position] = newest[chain]
            newest[chain] = position


@compile_kept(error_model="numpy")
def find_places(tokens, older, newest, starts, size, context, found):  # type: ignore[no-untyped-def]
    """Earlier occurrences of the end of `context` [n] in the first `size` of `tokens`.

    Writes `found` [most, 3], newest first: the position behind the occurrence, where its text ends,
    and how many tokens before the position equal those of the context, two at least. Returns how
    many there are.
    """
    count, last = 0, len(context) - 1
    if last < 1 or not size:
        return count
    position = newest[chain_of(context[last - 1], context[last], len(newest))]
    while position != NONE and count < len(found):
        if tokens[position] == context[last] and tokens[position - 1] == context[last - 1]:
            text = np.searchsorted(starts, position, "right")
            end = starts[text] if text < len(starts) else size
            if position + 1 < end:
                matched, most = 2, min(len(context), position + 1)
                while matched < most and tokens[position - matched] == context[last - matched]:
                    matched += 1
                found[count, 0], found[count, 1], found[count, 2] = position + 1, end, matched
                count += 1
        position = older[position]
    return count


@compile_kept(error_model="numpy")
def note_continuations(  # type: ignore[no-untyped-def]
    tokens, older, newest, starts, size, context, found, known, continuations
):
    """Find places as `find_places` does, and write what followed as `copy_continuations` does.

    Returns the row behind those that it has written.
    """
    count = find_places(tokens, older, newest, starts, size, context, found)
    copy_continuations(tokens, found, count, known, continuations)
    return known + count


@compile_kept(error_model="numpy")
def copy_continuations(tokens, found, count, known, continuations):  # type: ignore[no-untyped-def]
    """Write what followed each of the first `count` places of `found` into `continuations`.

    Row `known` and those behind it, [rows, most + 2]: how many tokens before the place were equal,
    how many follow, and these.
    """
    most = continuations.shape[1] - 2
    for number in range(count):
        row, begin = continuations[known + number], found[number, 0]
        row[0], row[1] = found[number, 2], min(most, found[number, 1] - begin)
        for at in range(row[1]):
            row[2 + at] = tokens[begin + at]


@compile_kept(error_model="numpy")
def follow_most(continuations, factor, least_share, path, best):  # type: ignore[no-untyped-def]
    """Write the tokens to draft into `best` [most]; returns how many. `path` [most] is for work.

    `continuations` are as in `copy_continuations`, the newest of equal rank first. Of the places
    that match at least a number of tokens, most have gone on alike: the path. Its score is how many
    of its tokens to expect. The path of the number with the best score is drafted.
    """
    most, length, best_score, drafted = len(best), 0, 0.0, 0
    follows = np.empty(len(continuations), np.bool_)
    for number in range(len(continuations)):
        length = max(length, continuations[number, 0])
    while length > 1:
        longest = min(most, int(factor * length))
        if longest <= best_score:
            break  # no draft expects more tokens than it has
        total, shorter = 0, 0
        for number in range(len(continuations)):
            matched = continuations[number, 0]
            follows[number] = matched >= length
            total += follows[number]
            if matched < length:
                shorter = max(shorter, matched)
        score, at = 0.0, 0
        while at < longest:
            agreeing, token = 0, 0
            for number in range(len(continuations)):
                if not follows[number] or continuations[number, 1] <= at:
                    continue
                proposed, count = continuations[number, 2 + at], 0
                if agreeing and proposed == token:
                    continue
                for other in range(number, len(continuations)):
                    if follows[other] and continuations[other, 1] > at:
                        count += continuations[other, 2 + at] == proposed
                if count > agreeing:  # of equal counts the newest
                    agreeing, token = count, proposed
            if not agreeing or agreeing / total < least_share:
                break
            path[at] = token
            score += agreeing / total
            for number in range(len(continuations)):
                if follows[number]:
                    goes_on = continuations[number, 1] > at
                    follows[number] = goes_on and continuations[number, 2 + at] == token
            at += 1
        if score > best_score:
            best[:at] = path[:at]
            best_score, drafted = score, at
        length = shorter
    return drafted
