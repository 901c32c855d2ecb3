"""What requests may hold: a field that would change a result and is not supported is refused.

An unsupported field is accepted with the value that changes nothing. `null` means the same as to
leave a field out. An unknown field is refused, so that nothing asked for is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reference.sampling import Sampling
from reference.serve.refusal import RefusalError

Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1)]
Stops = Stop | Annotated[list[Stop], Field(max_length=16)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]

STOPS = "a text, or a list of at most 16, none of them empty"

LARGEST_TOP = 20
"""How many of the likeliest tokens go with a token at most, on OpenAI's endpoints."""

LARGEST_TOPS = 1 << 20
"""How many `/completion` tells in one answer at most, if more than LARGEST_TOP go with a token."""


class Fields(BaseModel):
    """The fields of a request.

    neutral: unsupported fields, and the values of each that change nothing. harmless: fields that
    are ignored, because they change no result.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()


F = TypeVar("F", bound=Fields)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def defaults(sampling: Sampling) -> dict[str, Any]:
    """Values for the sampling fields that a request leaves out, by the names of all protocols."""
    return {**asdict(sampling), "repeat_penalty": sampling.repetition_penalty}


def parse(kind: type[F], body: Mapping[str, Any], instead: Mapping[str, Any] = NOTHING) -> F:
    """Check the fields of a request. Raises RefusalError, which names the first that is wrong.

    body: a JSON object. instead: values of fields that it leaves out, in place of the protocol's.
    """
    given = {name: value for name, value in instead.items() if name in kind.model_fields}
    for name, value in body.items():
        if value is None or name in kind.harmless:
            continue
        if name in kind.neutral:
            if not any(_same(value, neutral) for neutral in kind.neutral[name]):
                only = " or ".join(map(repr, kind.neutral[name])) or "null"
                raise RefusalError(400, f"{name}: it is not supported; only {only} is taken", name)
        else:
            given[name] = value
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal; a boolean equals no number."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(kind: type[Fields], error: ValidationError) -> RefusalError:
    first = error.errors(include_url=False, include_input=False)[0]
    name, *path = (_short(str(part)) for part in first["loc"] or ("body",))
    described = kind.model_fields[name].description if name in kind.model_fields else None
    if first["type"] == "extra_forbidden" and not path:
        return RefusalError(400, f"{name!a}: this field is not supported; leave it out", name)
    if described is not None:
        return RefusalError(400, f"{name}: it must be {described}", name)
    where = ".".join((name, *path))
    return RefusalError(400, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}", name)


def _short(name: str) -> str:
    """A name that a client gave, cut so that it cannot make an answer long."""
    return name if len(name) <= 80 else f"{name[:77]}..."


class LlamaCompletion(Fields):
    """The fields of `/completion`, with llama-server's names and defaults."""

    prompt: str | list[Token] = Field(description="a text or a list of token ids")
    n_predict: int = Field(-1, ge=-1)
    temperature: float = Field(0.8, ge=0)
    top_k: int = Field(40, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    min_p: float = Field(0.05, ge=0, le=1)
    repeat_penalty: float = Field(1.0, gt=0)
    repeat_last_n: int = -1
    seed: Seed = -1
    stop: Stops = Field(default_factory=list, description=STOPS)
    stream: bool = False
    n_probs: int = Field(0, ge=0)
    cache_prompt: bool = True
    return_tokens: bool = False
    ignore_eos: bool = False

    harmless = frozenset(
        {
            "dry_allowed_length",
            "dry_base",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "id_slot",
            "mirostat_eta",
            "mirostat_tau",
            "model",
            "sse_ping_interval",
            "xtc_threshold",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "dynatemp_range": (0,),
        "n_indent": (0,),
        "n_keep": (0,),
        "n_discard": (0,),
        "n_cmpl": (1,),
        "n": (1,),
        "n_cache_reuse": (0,),
        "typical_p": (1,),
        "top_n_sigma": (-1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "dry_multiplier": (0,),
        "xtc_probability": (0,),
        "mirostat": (0,),
        "grammar": ("",),
        "json_schema": (),
        "logit_bias": ([], {}),
        "min_keep": (0,),
        "t_max_predict_ms": (0,),
        "timings_per_token": (False,),
        "return_progress": (False,),
        "post_sampling_probs": (False,),
        "response_fields": ([],),
        "lora": ([],),
    }


class LlamaTokenize(Fields):
    """The fields of `/tokenize`, with llama-server's names and defaults."""

    content: str
    add_special: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "parse_special": (True,),
        "with_pieces": (False,),
    }


class StreamOptions(Fields):
    """What else a stream tells."""

    include_usage: bool = False
    harmless = frozenset({"include_obfuscation"})


class OpenAI(Fields):
    """The fields that OpenAI's two endpoints share.

    Those from `top_k` on are extensions, with the names that vLLM and llama-server give them.
    """

    model: str | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, lt=2**31)
    seed: Seed = -1
    stop: Stops = Field(default_factory=list, description=STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    ignore_eos: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    return_token_ids: bool = False

    harmless = frozenset(
        {
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
    }


class Completion(OpenAI):
    """The fields of `/v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(
        description="a text, a list of token ids, or a list of either"
    )
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=LARGEST_TOP)
    echo: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAI.neutral,
        "best_of": (1,),
        "suffix": ("",),
    }


class Part(Fields):
    """A part of a message."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str = ""


class Message(Fields):
    """One message. Whatever else it holds is for the template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Part] | None = None


class Chat(OpenAI):
    """The fields of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=LARGEST_TOP)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAI.neutral,
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
