"""Verifiers of form, which never say whether an answer is right: ``regex``, ``format``, ``length``, ``json_schema``.

Their ``correct`` is None. Give them ``requires:`` so that form pays nothing for a wrong answer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer
from grpo_dist.verifiers.registry import Options, Part, register


class RegexOptions(Options):
    pattern: str = Field(description="Python regular expression.")
    match: Literal["search", "full"] = Field("search", description="Somewhere in the completion, or all of it.")
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


@register("regex", RegexOptions)
def regex(item: VerifyItem, options: RegexOptions) -> Part:
    pattern = re.compile(options.pattern, re.DOTALL | (re.IGNORECASE if options.ignore_case else 0))
    match = pattern.fullmatch if options.match == "full" else pattern.search
    return Part(1.0 if match(item.completion) else 0.0)


class FormatOptions(Options):
    tags: tuple[str, ...] = Field(
        ("think", "answer"), min_length=1, description="Each exactly once, in this order, closed, with nothing between."
    )
    min_chars: int = Field(
        10,
        ge=1,
        description="Visible characters in each tag but the last, which needs one: an empty one earns 0.",
    )
    opened: bool = Field(False, description="The prompt already ends in the first opening tag.")
    outside: bool = Field(False, description="Text around the tags is allowed.")

    @field_validator("tags")
    @classmethod
    def _plain_names(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [tag for tag in tags if not re.fullmatch(r"[A-Za-z][\w-]*", tag)]:
            raise ValueError(f"tags are names without brackets, not {wrong[0]!r}")
        if len(set(tags)) != len(tags):
            raise ValueError("a tag is there twice")
        return tags


@register("format", FormatOptions)
def format_(item: VerifyItem, options: FormatOptions) -> Part:
    text = f"<{options.tags[0]}>" + item.completion if options.opened else item.completion
    place = 0
    for number, tag in enumerate(options.tags):
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1:
            return Part(0.0)
        opening, closing = text.find(start), text.find(end)
        inside = "".join(text[opening + len(start) : closing].split())
        needed = 1 if number == len(options.tags) - 1 else options.min_chars
        if not place <= opening < closing or len(inside) < needed:
            return Part(0.0)
        if not options.outside and text[place:opening].strip():
            return Part(0.0)
        place = closing + len(end)
    return Part(1.0 if options.outside or not text[place:].strip() else 0.0)


class LengthOptions(Options):
    max_tokens: int = Field(gt=0, description="From here on the part is -1.")
    buffer_tokens: int = Field(
        0, ge=0, description="The part falls from 0 to -1 over this many tokens before max_tokens."
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> LengthOptions:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} is more than max_tokens {self.max_tokens}")
        return self


@register("length", LengthOptions, low=-1.0, high=0.0)
def length(item: VerifyItem, options: LengthOptions) -> Part:
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13); a completion cut off is at the limit."""
    over = item.tokens - (options.max_tokens - options.buffer_tokens)
    if item.finish_reason == "length" or item.tokens >= options.max_tokens:
        return Part(-1.0)
    return Part(-over / options.buffer_tokens if over > 0 else 0.0)


class JsonSchemaOptions(Options):
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema itself.")
    path: Path | None = Field(None, description="Or a file that holds it.")

    @model_validator(mode="after")
    def _one_good_schema(self) -> JsonSchemaOptions:
        if (self.schema_ is None) == (self.path is None):
            raise ValueError("give either schema or path")
        schema_validator(self)
        return self


def schema_validator(options: JsonSchemaOptions) -> Any:
    """Raises ValueError when the schema cannot be read or is none. References never leave the schema."""
    import jsonschema
    import referencing

    try:
        schema = options.schema_ if options.path is None else json.loads(options.path.read_text())
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (OSError, TypeError) as error:
        raise ValueError(f"the schema cannot be read: {error}") from error
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    return kind(schema, registry=referencing.Registry())


_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)


@register("json_schema", JsonSchemaOptions)
def json_schema(item: VerifyItem, options: JsonSchemaOptions) -> Part:
    """The marked answer, else the last fenced block, else the whole completion, is JSON that the schema admits."""
    marked = marked_answer(item.completion)
    fenced = _FENCE.findall(item.completion)
    text = marked.text if marked.text is not None else fenced[-1] if fenced else item.completion
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return Part(0.0)
    return Part(1.0 if schema_validator(options).is_valid(value) else 0.0)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
