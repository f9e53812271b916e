"""A row's prompt -> the text the model sees -> token ids, with exactly one BOS where the tokenizer wants one.

``chat`` renders the tokenizer's own template (with the generation prompt); ``raw`` sends the text as it is. Whether the
text brings its BOS (chat templates often do) or the tokenizer adds it, the ids have it once. No EOS is ever added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from grpo_dist.errors import DataError

_SLACK = 8  # BOS, and what tokenizers put before a text
_ROLES = ("system", "user", "assistant", "tool")


class PromptTemplate:
    """Args: a ``transformers`` tokenizer, the template's kind, and a system message for prompts that bring none.

    Raises DataError when the tokenizer cannot do what is asked.
    """

    def __init__(self, tokenizer: Any, kind: Literal["chat", "raw"], system_prompt: str | None = None) -> None:
        if kind == "chat" and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "data.template: 'chat' needs a tokenizer with a chat template, this one has none; use 'raw'"
            )
        if kind == "raw" and system_prompt is not None:
            raise DataError("data.system_prompt: needs data.template 'chat'; with 'raw' write it into the prompts")
        self.tokenizer, self.kind, self.system_prompt = tokenizer, kind, system_prompt
        self.bos: int | None = tokenizer.bos_token_id
        probe = tokenizer("1")["input_ids"]
        self.wants_bos = self.bos is not None and bool(probe) and probe[0] == self.bos
        self._around = self._characters_around()

    def render(self, prompt: Any) -> str:
        """The text of one prompt. Raises ValueError that says what was wanted."""
        if self.kind == "raw":
            if not isinstance(prompt, str) or not prompt:
                raise ValueError("a text that is not empty (template 'raw')")
            text = prompt
        else:
            try:
                text = str(
                    self.tokenizer.apply_chat_template(
                        self.messages(prompt), tokenize=False, add_generation_prompt=True
                    )
                )
            except TemplateError as error:
                raise ValueError(f"messages that the tokenizer's chat template takes ({error})") from error
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"valid Unicode, without half a surrogate pair (character {at})")
        return text

    def most_tokens(self, prompt: Any) -> int | None:
        """A bound on the tokens of a prompt that needs no rendering; None where there is no such bound.

        A token stands for at least one character of ASCII text, whatever the tokenizer (beyond ASCII, normalisation may
        make many characters of one), and a template that only surrounds a plain text adds the same to each.
        """
        if self._around is None or not isinstance(prompt, str) or not prompt.isascii() or not prompt.strip():
            return None
        return len(prompt) + self._around + _SLACK

    def _characters_around(self) -> int | None:
        if self.kind == "raw":
            return 0
        around = set()
        for probe in ("zqxj", "wvkb"):
            try:
                before, found, after = self.render(probe).partition(probe)
            except ValueError:
                return None
            around.add((before, after))
            if not found or probe in after:
                return None
        return sum(map(len, next(iter(around)))) if len(around) == 1 else None

    def messages(self, prompt: Any) -> list[dict[str, str]]:
        if isinstance(prompt, str) and prompt.strip():
            messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and prompt:
            messages = prompt
            for message in messages:
                if not isinstance(message, dict) or message.get("role") not in _ROLES:
                    raise ValueError(f"messages with a role ({', '.join(_ROLES)})")
                if not isinstance(message.get("content"), str):
                    raise ValueError("messages whose content is a text")
            if messages[-1]["role"] == "assistant":
                raise ValueError("a last message that the model can answer, not one of the assistant")
        else:
            raise ValueError("a text that is not empty, or a list of chat messages")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered texts."""
        if not texts:
            return []
        encoded: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self._one_bos(ids) for ids in encoded]

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self.bos is None:
            return ids
        first = 0
        while first < len(ids) and ids[first] == self.bos:
            first += 1
        return [self.bos, *ids[first:]] if first or self.wants_bos else ids


def lone_surrogate(text: str) -> int | None:
    """Where a text holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
