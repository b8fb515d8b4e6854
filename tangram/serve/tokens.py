"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, WithJsonSchema, model_validator

from tangram.serve.bodies.answer_body import TOKENS
from tangram.serve.bodies.body import Body, Text
from tangram.serve.bodies.template import FIELD, TemplateOptions
from tangram.serve.bodies.unsupported import TOKENIZE, wrong_field
from tangram.serve.chat.chat_messages import Messages, PromptEnd
from tangram.serve.service import Service


class TokenizeRequest(PromptEnd):
    """Either `prompt`, a raw text, or `messages`, a conversation up to its answer.

    `model` None is the served model.
    """

    refused = TOKENIZE
    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateOptions = Field(default={})
    add_special_tokens: bool | None = Field(
        default=None, description="those around a raw text: always there"
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "send either 'prompt' or 'messages'")
        if self.messages is not None:
            self.check_end(self.messages)
        else:
            for name, field in PromptEnd.model_fields.items():
                if getattr(self, name) != field.default:
                    raise wrong_field(name, f"'{name}' goes with 'messages' only: leave it out")
        if self.chat_template_kwargs and self.messages is None:
            raise wrong_field(FIELD, f"'{FIELD}' goes with 'messages' only: leave it out")
        always = self.messages is None
        if self.add_special_tokens not in (None, always):
            message = (
                f"'add_special_tokens' is always {str(always).lower()} for "
                f"{'prompts' if always else 'messages'}"
            )
            raise wrong_field("add_special_tokens", f"{message}: leave it out")
        return self

    async def tokens(self, service: Service) -> tuple[int, ...]:
        """The tokens that the server would compute; raises `RequestError` if they never fit."""
        if self.messages is not None:
            options = service.template.set_variables(self.chat_template_kwargs)
            options |= self.template_options
            messages = [message.for_template() for message in self.messages]
            return await service.prompts.tokenize_chat(messages, "messages", options=options)
        return await service.prompts.tokenize_text(self.prompt or "")


class DetokenizeRequest(Body):
    """The text of `tokens`, special ones by name."""

    model: Text | None = None
    tokens: Annotated[list[int], WithJsonSchema(TOKENS | {"minItems": 0})] = Field(
        max_length=TOKENS["maxItems"], fail_fast=True
    )
