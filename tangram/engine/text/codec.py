"""Text to tokens and back: the tokenizer and the chat template of a model."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain, groupby
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol, cast

from tangram.engine.text.recent_texts import RecentTexts
from tangram.engine.text.templates import ChatTemplate
from tangram.engine.text.thinking import thinking_format
from tangram.engine.text.token_names import TokenNames
from tangram.engine.text.tools import TOOL_MARK, marks, tool_format
from tangram.errors import RequestError
from tangram.types import Marks, ThinkingFormat, ToolFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # decoders' replacement for bytes that are not (yet) a character
_MOST_SHRINKING = 4  # a normalizer (NFKC) may make one byte of four
_KEPT_TEXTS = 1 << 14  # of single tokens; a stream reads each of its tokens alone once
# Of conversations, tokenized: some 30 of 60,000 tokens each, in at most 50 MB.
_KEPT_PARTS, _KEPT_CHARACTERS = 1 << 16, 1 << 23
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _Decoder(Protocol):
    def __call__(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class TokenText:
    """One token as `logprobs` reports it.

    `raw` is its exact bytes where `text` has replacement characters.
    """

    text: str
    raw: bytes


class TextCodec:
    """A Transformers tokenizer as the engine uses it. Safe to share between threads.

    `eos_token_ids` are the end tokens of the model's generation config, besides the tokenizer's
    own. The formats are names of `formats.py`; `auto` is what the chat template shows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Iterable[int] = (),
        tool_format: str = "auto",
        thinking_format: str = "auto",
    ) -> None:
        self._format_names = tool_format, thinking_format
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.tokenizer, self._decoder = tokenizer, _find_decoder(tokenizer)
        self._decode_one = _keep_texts(self._decoder)
        self.template = ChatTemplate(tokenizer)
        self.eos_token_ids = frozenset((*ends, *eos_token_ids))
        added = {
            i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.special_token_ids = frozenset((*tokenizer.all_special_ids, *added))
        tool_marks = filter(TOOL_MARK.fullmatch, map(str, tokenizer.added_tokens_decoder.values()))
        self._controls = frozenset((*tokenizer.all_special_tokens, *added.values(), *tool_marks))
        self._edge = token_hex(16)  # nobody can guess it, so that no message has it
        self._tokenized: RecentTexts[array[int]] = RecentTexts(_KEPT_PARTS, _KEPT_CHARACTERS)
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)

    def __reduce__(self) -> tuple[object, ...]:
        """To another process it travels as what it is made of: it has processes of its own."""
        return _make_codec, (self.tokenizer, self.eos_token_ids, *self._format_names)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt, with the model's special tokens around it (such as BOS).

        Raises `RequestError` (`prompt`) if the tokenizer gives up.
        """
        with _explain_panic("prompt"):
            return tuple(self.tokenizer.encode(text))

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text in a token: n tokens hold at most n times as many."""
        longest = max(len(piece.encode()) for piece in self.tokenizer.get_vocab())
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return (
            longest
            if backend is not None and backend.normalizer is None
            else longest * _MOST_SHRINKING
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if its template has none, or an unknown format."""
        if self.tokenizer.chat_template is None:
            return None
        return tool_format(self.template, self._format_names[0])

    @cached_property
    def thinking_format(self) -> ThinkingFormat | None:
        """How the model marks its thoughts; None if its template shows no such marks."""
        if self.tokenizer.chat_template is None:
            return None
        return thinking_format(self.template, self._format_names[1])

    @cached_property
    def marks(self) -> Marks:
        """The tokens that delimit calls and thoughts."""
        return marks(self.tokenizer, self.tool_format, self.thinking_format)

    @cached_property
    def template_options(self) -> frozenset[str]:
        """The variables of the model's chat template that a request may set."""
        return self.template.options

    def warm(self) -> None:
        """Do in advance what the first conversation would wait for. Raises `MachineError`."""
        self.template.warm()
        _ = self.marks, self.template_options

    def close(self) -> None:
        """End what renders conversations."""
        self.template.close()

    @cached_property
    def control_token_ids(self) -> tuple[int, ...]:
        """Special tokens that do not end a text."""
        return tuple(sorted(self.special_token_ids - self.eos_token_ids))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to the start of the assistant's answer.

        `tools` are those of the OpenAI API, `options` are among `template_options`. Only the
        template writes control tokens and marks of tool calls: their names inside messages, tools
        and options become the tokens of ordinary text. Raises as `render_chat` does.
        """
        return self.encode_chat(self.render_chat(messages, tools, options))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """The text of a conversation, in parts that `encode_chat` tokenizes.

        A part ends inside each name of a control token that a message has. Raises
        `RequestError` (field `messages`) if the model has no chat template, or if its template
        rejects the messages or takes too much time or memory. Raises `MachineError` if it could not
        be rendered.
        """
        if self.tokenizer.chat_template is None:
            raise RequestError(
                lambda field: (
                    f"{field}: this model has no chat template, send a plain prompt instead"
                ),
                "messages",
            )
        if not messages:
            raise RequestError(
                lambda field: f"{field} is empty, it must hold at least one message", "messages"
            )
        mark = token_hex(16)  # nobody can guess it, so that no message has it
        hidden = [
            self._hide(message, mark, written=message.get("role") == "assistant")
            for message in messages
        ]
        rendered = self.template.render(
            hidden, self._hide(list(tools), mark), self._hide(dict(options or {}), mark)
        )
        return tuple(rendered.split(mark))

    def encode_chat(self, parts: Iterable[str], salt: str = "") -> tuple[int, ...]:
        """The tokens of what `render_chat` returns.

        Texts that a conversation of the same `salt` had before are not tokenized again: the time
        tells nothing of other salts. Raises `RequestError` (`messages`) if the tokenizer gives up.
        """
        mark = token_hex(16)
        with _explain_panic("messages"):
            return tuple(chain.from_iterable(self._encode_rendered(mark.join(parts), mark, salt)))

    def _hide(self, value: Any, mark: str, *, written: bool = False) -> Any:
        """`value` with `mark` inside every name of a control token, to hide these names.

        Marks of thoughts that are ordinary tokens are hidden too, unless the model has `written`
        the value: templates look for these marks in its past answers.
        """
        if isinstance(value, str):
            return self._hidden[written].hide(value, mark)
        if isinstance(value, Mapping):
            return {
                self._hide(name, mark, written=written): self._hide(item, mark, written=written)
                for name, item in value.items()
            }
        return (
            [self._hide(item, mark, written=written) for item in value]
            if isinstance(value, (list, tuple))
            else value
        )

    @cached_property
    def _structure(self) -> TokenNames:
        """The names of all tokens that only the template may write."""
        return TokenNames((*self._controls, *self.marks.words.values()))

    @cached_property
    def _hidden(self) -> tuple[TokenNames, TokenNames]:
        """The names to hide in values, and in those that the model has written."""
        return self._structure, TokenNames(self._controls)

    @cached_property
    def _template_tokens(self) -> tuple[TokenNames, dict[str, int]]:
        """The names that are tokens wherever the template writes them, and these tokens."""
        known = self.tokenizer.added_tokens_decoder.items()
        tokens = {str(token): number for number, token in known if str(token) in self._structure}
        return TokenNames(tokens), tokens

    def _encode_rendered(self, rendered: str, mark: str, salt: str) -> Iterator[Iterable[int]]:
        """The tokens of a rendered conversation, some at a time.

        In the conversation `mark` hides names of control tokens. What lies between two control
        tokens is encoded as a whole, as the tokenizer does it: it may have its own way to begin
        each part.
        """
        # Texts are at the odd places, names between them.
        names = self._structure.split(rendered) if mark in rendered else [rendered]
        parts = ["", *names, ""]
        for hidden, run in groupby(range(len(parts)), lambda at: mark in parts[at]):
            places = list(run)
            text = "".join(parts[at] for at in places).replace(mark, "")
            if hidden:
                around = parts[places[0] - 1], parts[places[0] + 1]
                yield self._encode_known(salt, text, *around)
            elif self._plain is not None:
                yield from self._encode_parts(salt, text)
            elif text:
                yield self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_parts(self, salt: str, text: str) -> Iterator[Iterable[int]]:
        """The tokens of `text`, as the tokenizer gives them, some at a time."""
        names, tokens = self._template_tokens
        parts = ["", *names.split(text), ""]
        for at in range(1, len(parts) - 1):
            if at % 2 == 0:
                yield (tokens[parts[at]],)
            elif parts[at]:
                yield self._encode_known(salt, parts[at], parts[at - 1], parts[at + 1])

    def _encode_known(self, salt: str, text: str, before: str, after: str) -> Iterable[int]:
        """See `_encode_text`, which is not asked twice for what it has said recently."""
        key = salt, text, before, after
        tokens = self._tokenized.find(key)
        if tokens is None:
            tokens = array("i", self._encode_text(text, before, after))
            self._tokenized.keep(key, tokens)
        return tokens

    def _encode_text(self, text: str, before: str, after: str) -> list[int]:
        """The tokens of `text` between control tokens of these names, and none of them in it.

        An empty name stands for the beginning or the end of the conversation.
        """
        if self._plain is None:
            return list(
                self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            )
        known = {str(token): token for token in self.tokenizer.added_tokens_decoder.values()}
        # A token may take in the spaces beside it.
        text = text.lstrip() if before in known and known[before].rstrip else text
        text = text.rstrip() if after in known and known[after].lstrip else text
        # Some tokenizers begin the very first text in another way.
        edges = [self._edge] if before else []
        pieces = self._plain.encode("".join([*edges, text])).tokens[len(edges) :]
        return cast("list[int]", self.tokenizer.convert_tokens_to_ids(pieces))

    @cached_property
    def _plain(self) -> Tokenizer | None:
        """The tokenizer, over the same model, without the control tokens.

        None if it is not of the library that can do this.
        """
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        plain = Tokenizer(backend.model)
        plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        others = [
            token
            for token in backend.get_added_tokens_decoder().values()
            if token.content not in self._structure
        ]
        plain.add_tokens([*others, AddedToken(self._edge, normalized=False)])
        return plain

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        if len(token_ids) == 1:
            return self._decode_one(token_ids[0])
        return self._decode(list(token_ids), skip_special_tokens=True)

    def encode_mark(self, mark: str) -> tuple[int, ...]:
        """The tokens of the name of a mark, which is one token where the model has it."""
        return tuple(self.tokenizer.encode(mark, add_special_tokens=False))

    def read_known(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens by name and unknown ones left out."""
        known = [token for token in token_ids if 0 <= token < len(self.tokenizer)]
        return self._decode(known, skip_special_tokens=False)

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of `token_ids`, special tokens by name.

        Raises `RequestError` (`field`) if one is unknown.
        """
        for token in token_ids:
            if not 0 <= token < len(self.tokenizer):
                raise RequestError(
                    f"{field} has token {token}, it must lie in [0, {len(self.tokenizer) - 1}]",
                    field,
                )
        return self.spell(token_ids)

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens by name; an unknown token has none."""
        return self._decode(list(token_ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> TokenText:
        """One token as it reads inside a text (leading space kept), special tokens by name."""
        before = self._decode(self._anchor, skip_special_tokens=False)
        text = self._decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]
        raw = self._piece_bytes(token_id) if _REPLACEMENT in text else text.encode()
        return TokenText(text, raw)

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._decoder(token_ids, skip_special_tokens=skip_special_tokens)

    def _piece_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that is not whole characters.

        It is `<0xE2>` (SentencePiece) or in GPT-2's byte alphabet.
        """
        piece = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        alphabet = _byte_alphabet()
        return b"".join(alphabet.get(character, character.encode()) for character in piece)


def _make_codec(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int], tools: str, thinking: str
) -> TextCodec:
    return TextCodec(
        tokenizer, eos_token_ids=eos_token_ids, tool_format=tools, thinking_format=thinking
    )


@contextmanager
def _explain_panic(field: str) -> Iterator[None]:
    """Raise `RequestError` (`field`) where a tokenizer's library panics.

    A regular expression that takes too many steps on a text, such as millions of spaces, ends in a
    panic. Its class cannot be imported and is no `Exception`, so no other handler would see it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = f"the model's tokenizer has given up: {error}; shorten runs of one character"
        raise RequestError(lambda name: f"{name} cannot be tokenized, {reason}", field) from error


def _find_decoder(tokenizer: PreTrainedTokenizerBase) -> _Decoder:
    """Decodes tokens as `tokenizer` does, without its clean-up.

    That would remove spaces before punctuation that are already sent. Where Transformers hands the
    tokens on as they are, this does so at once: each token is decoded twice.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = type(tokenizer)
    theirs = (TokenizersBackend.decode, TokenizersBackend._decode)
    if isinstance(tokenizer, TokenizersBackend) and (kind.decode, kind._decode) == theirs:
        direct: _Decoder = tokenizer.backend_tokenizer.decode
        return direct

    def decode(token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return str(
            tokenizer.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    return decode


def _keep_texts(decoder: _Decoder) -> Callable[[int], str]:
    """The text of a token alone, kept. Not a method: a codec ends with its last reference."""

    @lru_cache(_KEPT_TEXTS)
    def decode_one(token_id: int) -> str:
        return decoder([token_id], skip_special_tokens=True)

    return decode_one


@cache
def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable character for each byte (Radford et al. 2019, section 2.2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
