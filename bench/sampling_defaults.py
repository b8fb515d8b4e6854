"""Which sampling suits the embedded model: `python -m bench.sampling_defaults OUT.json`.

Thirty questions with one short answer are asked twice at each setting. An answer is right if
one of the accepted words is in it. Six requests for longer texts show what sampling does to form: a
text is stuck if its limit has cut it and eight words in a row stand in it three times or more.
Every setting states all values, so what the engine takes by itself makes no difference.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from tangram import LLM, SamplingParams
from tangram_lab.environment import environment

SEEDS = 2
SHORT_TOKENS, LONG_TOKENS = 40, 200
RUN_WORDS, MOST_RUNS = 8, 3

QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Italy?": "rome",
    "What is the capital of Germany?": "berlin",
    "What is the capital of England?": "london",
    "Which planet is known as the Red Planet?": "mars",
    "Which is the largest planet of the solar system?": "jupiter",
    "Which planet is closest to the Sun?": "mercury",
    "Which gas do plants take from the air?": "carbon dioxide|co2",
    "Which gas do we need to breathe?": "oxygen",
    "At how many degrees Celsius does water boil?": "100",
    "How many days are in a week?": "7|seven",
    "How many months are in a year?": "12|twelve",
    "How many continents are there?": "7|seven",
    "How many legs does a spider have?": "8|eight",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "Who painted the Mona Lisa?": "leonardo|vinci",
    "Who developed the theory of relativity?": "einstein",
    "Which is the largest ocean on Earth?": "pacific",
    "Which is the tallest mountain on Earth?": "everest",
    "Which animal is called the king of the jungle?": "lion",
    "Which language is spoken in Brazil?": "portuguese",
    "What is the chemical formula of water?": "h2o|h₂o",
    "What do bees make?": "honey",
    "What is the opposite of hot?": "cold",
    "What colour do you get when you mix blue and yellow?": "green",
    "What is the first month of the year?": "january",
    "What is frozen water called?": "ice",
    "Which star is at the centre of our solar system?": "sun",
    "What is the currency of the United States?": "dollar",
}
TASKS = (
    "Explain how rain forms.",
    "Write a short story about a lighthouse keeper.",
    "Give me five tips for learning a language.",
    "Why is the sky blue?",
    "Write a polite email that asks for a day off.",
    "How do I make tea?",
)
SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.5, top_p 0.9": {"temperature": 0.5, "top_p": 0.9},
    "temperature 0.2, top_p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "temperature 0.2, top_p 0.9, repetition_penalty 1.1": {
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
    "temperature 0": {"temperature": 0.0},
    "temperature 0, repetition_penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
}


def is_right(answer: str, accepted: str) -> bool:
    """Whether one of the words of `accepted`, with | between, is in `answer`."""
    return re.search(rf"(?<!\w)({accepted})", answer.lower()) is not None


def is_stuck(text: str) -> bool:
    """Whether a run of words comes again and again."""
    words = text.lower().split()
    runs = Counter(tuple(words[at : at + RUN_WORDS]) for at in range(len(words)))
    return any(count >= MOST_RUNS for run, count in runs.items() if len(run) == RUN_WORDS)


def measure(llm: LLM, values: dict[str, float]) -> dict[str, float]:
    """The figures of one setting: shares of all answers."""
    seeds = range(1 if values.get("temperature") == 0 else SEEDS)
    right = first = stuck = cut = 0
    for seed in seeds:
        short = _ask(llm, list(QUESTIONS), SHORT_TOKENS, seed, values)
        marks = [
            is_right(answer, accepted)
            for (answer, _), accepted in zip(short, QUESTIONS.values(), strict=True)
        ]
        right += sum(marks)
        first += marks[0]
        long = _ask(llm, list(TASKS), LONG_TOKENS, seed, values)
        cut += sum(reason == "length" for _, reason in long)
        stuck += sum(reason == "length" and is_stuck(text) for text, reason in long)
    return {
        "right": right / len(QUESTIONS) / len(seeds),
        "first_question_right": first / len(seeds),
        "stuck": stuck / len(TASKS) / len(seeds),
        "cut": cut / len(TASKS) / len(seeds),
        "seeds": len(seeds),
    }


def _ask(
    llm: LLM, texts: list[str], tokens: int, seed: int, values: dict[str, float]
) -> list[tuple[str, str]]:
    params = SamplingParams.state_all(**values, seed=seed, max_tokens=tokens)
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return [(one.outputs[0].text, one.outputs[0].finish_reason) for one in outputs]


def main(target: Path) -> None:
    """Measure all settings, print a table, and write the figures to `target`."""
    llm = LLM("smollm2")
    figures = {}
    for name, values in SETTINGS.items():
        figures[name] = measure(llm, values)
        print(name, figures[name], flush=True)
    record = {"environment": environment(), "settings": figures}
    target.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the JSON file of the figures")
    main(parser.parse_args().target)
