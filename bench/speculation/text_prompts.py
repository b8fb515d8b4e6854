"""Prompts of real text in the chat form of a model."""

from __future__ import annotations

from itertools import cycle, islice

from bench.speculation.runs import Prompt
from tangram.calibrate.texts import list_kinds, make_texts
from tangram.engine.text.codec import TextCodec

_CHARACTERS = 6  # of a token, more than any of the texts has on average
SEED = 23  # calibration reads the texts of seed 0
ASKS = {
    "dialogue": "Summarise the conversation above: who said what?",
    "source": "Explain in detail what the source code above does.",
    "documentation": "Explain the main points of the documentation above.",
    "table": "Describe the table above and list some of its rows.",
    "log": "Describe what happened according to the log above.",
}
ASK = "Tell in your own words what the text above says."
REPEATED_TOKENS = 100


def put_question(codec: TextCodec, text: str, ask: str, tokens: int) -> Prompt:
    """The prompt of `ask` behind the beginning of `text`, of about `tokens` tokens."""
    around = len(codec.chat_prompt([{"role": "user", "content": f"\n\n{ask}"}]))
    begin = codec.decode(codec.tokenizer.encode(text)[: max(1, tokens - around)])
    return codec.chat_prompt([{"role": "user", "content": f"{begin}\n\n{ask}"}])


def ask_about_texts(codec: TextCodec, count: int, tokens: int, number: int) -> list[Prompt]:
    """`count` prompts with different texts of eight kinds; other ones for each `number`."""
    texts = make_texts(count, SEED + number, min_characters=max(1000, _CHARACTERS * tokens))
    asks = [ASKS.get(kind, ASK) for kind in list_kinds(count)]
    return [put_question(codec, text, ask, tokens) for text, ask in zip(texts, asks, strict=True)]


def repeat_texts(codec: TextCodec, count: int, tokens: int, number: int) -> list[Prompt]:
    """`count` prompts of `tokens` tokens, in each a passage that comes again and again.

    They end within a repetition, with which a model goes on. Other ones for each `number`.
    """
    texts = make_texts(count, SEED + number, min_characters=1000)
    passages = [codec.tokenizer.encode(text)[:REPEATED_TOKENS] for text in texts]
    return [tuple(islice(cycle(passage), tokens)) for passage in passages]
