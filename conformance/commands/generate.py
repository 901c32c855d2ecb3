"""`bitforbit generate`: text from a model, as it comes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conformance.commands.advice import add_advice, advised
from conformance.commands.common import MODES, OK, add_json, json_writer, text_of
from conformance.commands.memory import PASS, add_memory, layer_bar
from conformance.paths import model_folder

if TYPE_CHECKING:
    from reference.arithmetic import F32
    from reference.model import Model
    from reference.request import Result
    from reference.sampling import Sampling

DESCRIPTION = """\
Generate text with a model folder (config.json, *.safetensors, tokenizer.json) or a GGUF file.

  bitforbit generate --model fixtures/tiny-dense --prompt "In the beginning"
  bitforbit generate --model PATH --prompt @prompt.txt -n 64 --temperature 0.8 --seed 7 --json
  bitforbit generate --model PATH --prompt @prompt.txt --generation-config auto --top-k 40
  bitforbit generate --model fixtures/tiny-dense --draft fixtures/tiny-draft --prompt "And God"
  bitforbit generate --model PATH --prompt @turn-2.txt --prompt-cache conversation.cache
  bitforbit generate --model PATH --prompt-ids 5,17,9 -n 8
"""


ENDED = {
    "length": "",
    "token": "; ended by a stop token",
    "string": "; ended by a stop text",
    "context": "; ended where the model's context does",
}
"""What is said of why a text ends."""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    generate = commands.add_parser(
        "generate", help="generate text", description=DESCRIPTION, **style
    )
    generate.add_argument(
        "-m", "--model", required=True, metavar="PATH", help="a model folder, or a .gguf file"
    )
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT|@FILE", help="the prompt, or a file of it")
    prompt.add_argument(
        "--prompt-ids",
        type=token_ids,
        metavar="N,..",
        help="the prompt's token ids, for a model without a tokenizer, too",
    )
    generate.add_argument(
        "-n", "--max-new-tokens", type=int, default=128, metavar="N", help="at most (128)"
    )
    generate.add_argument("--weights", choices=MODES, default="float32", help="(float32)")
    generate.add_argument(
        "--arithmetic", choices=("exact", "float32"), default="exact", help="(exact)"
    )
    generate.add_argument("--exact-prefill", action="store_true", help="never use fast attention")
    add_advice(generate)
    sampling = generate.add_argument_group(
        "sampling", "Each of these comes before what --generation-config says."
    )
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K likeliest; 0 keeps all (default)"
    )
    sampling.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest that sum up to P (1: all)"
    )
    sampling.add_argument(
        "--min-p", type=float, metavar="P", help="keep what has P times the likeliest's share (0)"
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="of tokens that came before; 1 is none (default)",
    )
    generate.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    generate.add_argument(
        "--draft",
        metavar="ngram|PATH",
        help="speculate: drafts by n-gram lookup, or by a smaller model with the same vocabulary",
    )
    generate.add_argument(
        "--draft-tokens", type=int, default=4, metavar="N", help="drafted tokens of a pass (4)"
    )
    generate.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="positions of a cache page (16)"
    )
    generate.add_argument(
        "--kv-dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        default="float32",
        help="what keys and values are rounded to (float32)",
    )
    generate.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="start from what FILE holds, if it exists, and write what was computed to it",
    )
    add_memory(generate)
    add_json(generate, "the result")
    generate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate text, streamed as it comes."""
    from reference.engine import MAX_BATCHED_TOKENS, Engine
    from reference.model import load_model
    from reference.request import Options

    write, spoken = json_writer(options.json, indent=None), options.json != "-"
    prompt = options.prompt_ids or text_of(options.prompt, "--prompt")
    folder = model_folder(options.model)
    sampling = _sampling(options, folder)
    model = load_model(folder, options.weights, options.arithmetic, options.memory)

    def speak(piece: str) -> None:
        if sys.stdout.isatty():
            bar.stop()
        sys.stdout.write(piece)
        sys.stdout.flush()

    engine = Engine(
        model,
        options.exact_prefill,
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
        draft=_draft(options.draft),
        draft_tokens=options.draft_tokens,
        max_batched_tokens=MAX_BATCHED_TOKENS if model.memory is None else PASS,
    )
    if options.prompt_cache is not None and options.prompt_cache.exists():
        engine.restore_cache(options.prompt_cache)
    wanted: Options = {"sampling": sampling, "seed": options.seed, "stop": options.stop}
    if spoken:
        wanted["on_text"] = speak
    with layer_bar(model, options.max_new_tokens) as bar:

        def take(token: int, logits: F32) -> None:
            bar.tokens(1)
            if spoken and model.tokenizer is None:
                speak(f"{token} ")

        wanted["on_token"] = take
        try:
            result = engine.generate(prompt, options.max_new_tokens, **wanted)
        except KeyboardInterrupt:
            if spoken:
                print()  # what is said of it stands on a line of its own
            raise
    if options.prompt_cache is not None:
        engine.save_cache(options.prompt_cache)
    if write is not None:
        write(_fields(result))
    if spoken:
        print()
        print(_summary(result, options.draft is not None), file=sys.stderr)
    return OK


def _sampling(options: argparse.Namespace, model: Path) -> Sampling:
    """What is asked for of sampling, else what is advised, else the defaults."""
    from reference.sampling import Sampling

    given = {name: vars(options)[name] for name in Sampling.__annotations__}
    return replace(
        advised(options, model) or Sampling(),
        **{name: value for name, value in given.items() if value is not None},
    )


def _fields(result: Result) -> dict[str, Any]:
    """A result as JSON has it."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "stop": result.stop,
        "prompt_n": result.prompt_n,
        "cache_n": result.cache_n,
        "draft": {**vars(result.draft), "acceptance_rate": result.draft.acceptance_rate},
        "timings": vars(result.timings),
    }


def _summary(result: Result, drafted: bool) -> str:
    """What is said below a text: counts, times, drafts where there were any, and why it ends."""
    times, draft = result.timings, result.draft
    first = times.time_to_first_token * 1000
    reused = f" and {result.cache_n} reused" if result.cache_n else ""
    drafts = (
        f"; {draft.acceptance_rate:.0%} of {draft.drafted} drafted tokens accepted, "
        f"{draft.tokens_per_pass:.2f} tokens a pass"
    )
    return (
        f"{result.prompt_n} prompt tokens{reused}, first token after {first:.0f} ms "
        f"({_rate(times.prefill_rate)}); {len(result.tokens)} tokens at "
        f"{_rate(times.decode_rate)}{drafts if drafted else ''}{ENDED[result.stop]}"
    )


def _rate(tokens: float) -> str:
    """Tokens a second, in three digits where they are few."""
    return f"{tokens:.0f} tokens/s" if tokens >= 100 else f"{tokens:.3g} tokens/s"


def token_ids(text: str) -> list[int]:
    """Token ids, split by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} are no token ids; give whole numbers, split by commas"
        ) from None


def _draft(given: str | None) -> Literal["ngram"] | Model | None:
    """What --draft names: nothing, n-gram lookup, or a model that is loaded."""
    from reference.model import load_model

    if given is None:
        return None
    return "ngram" if given == "ngram" else load_model(model_folder(given))
