"""Whether prefill or decode is the problem, by the rows of a bench.

A request waits for its prompt (prefill: many tokens a pass, usually bound by compute), and then for
one pass after another (decode: one token a pass, usually bound by reading weights and cache). What
helps one of them hardly affects the other, so the first question is which takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reference.errors import RequestError

Row = Mapping[str, Any]

ARM = ("model", "digest", "arithmetic", "weights", "memory", "threads", "server", "cpu", "n_depth")
"""What rows have in common that belong to the same requests."""

HELPS: Mapping[str, tuple[str, str]] = {
    "prefill": (
        "reuse of prompt prefixes, shorter prompts, faster attention and matrix products, more "
        "compute (threads, a card), lower precision of products",
        "speculation, smaller weights alone, more memory bandwidth",
    ),
    "decode": (
        "fewer bytes a token (weights that stay packed, a smaller cache), more memory bandwidth, "
        "speculation, and for the total of many users larger batches",
        "reuse of prompt prefixes, chunked prefill, faster prefill attention, more compute alone",
    ),
    "both": (
        "what helps either one, by at most its share: batches of requests, a faster machine",
        "work on one of them alone: it leaves the other as it is",
    ),
}
"""What would help, and what would not."""


@dataclass(frozen=True)
class Problem:
    """A request of n_prompt and n_output tokens. prefill, decode: seconds. Row: its labels.

    share: decode's part of the whole; median, least and most over the runs. problem: `both` where
    the runs do not agree on which is the larger.
    """

    row: Row
    attention: str | None
    n_prompt: int
    n_output: int
    prefill: float
    decode: float
    share: tuple[float, float, float]
    repetitions: int

    @property
    def problem(self) -> Literal["prefill", "decode", "both"]:
        """The larger of the two."""
        _, least, most = self.share
        return "decode" if least > 0.5 else "prefill" if most < 0.5 else "both"

    @property
    def sentence(self) -> str:
        """The answer, in one sentence."""
        median, least, most = self.share
        told = (median, least, most)
        if self.problem == "prefill":
            told = (1 - median, 1 - most, 1 - least)
        name = "decode" if self.problem == "both" else self.problem
        what = {"both": "Neither alone"}.get(self.problem, f"{name.capitalize()} is the problem")
        of = f"a prompt of {self.n_prompt} and an output of {self.n_output} tokens"
        share = f"{told[0]:.0%} ({told[1]:.0%} to {told[2]:.0%} over {self.repetitions} runs)"
        return f"{what}: of {of}, {name} takes {share} of {self.prefill + self.decode:.3g} s."

    def figures(self) -> dict[str, Any]:
        """The answer as one flat object."""
        helps, helps_not = HELPS[self.problem]
        median, least, most = self.share
        return {
            **{name: self.row.get(name) for name in ARM},
            "attention": self.attention,
            "n_prompt": self.n_prompt,
            "n_output": self.n_output,
            "cache_n": self.row["cache_n"],
            "prompt_n": self.row["prompt_n"],
            "repetitions": self.repetitions,
            "prefill_seconds": self.prefill,
            "decode_seconds": self.decode,
            "decode_share_median": median,
            "decode_share_least": least,
            "decode_share_most": most,
            "problem": self.problem,
            "sentence": self.sentence,
            "helps": helps,
            "helps_not": helps_not,
        }


def problems(rows: Sequence[Row], output: int | None = None) -> Iterator[Problem]:
    """The problem of each prompt in a bench, beside the output of the same arm and depth.

    output: tokens that follow, at the rate that was measured; as many as were measured, where it is
    None. rows: those of `Row.figures`, or what `read_rows` gives. Raises RequestError where a
    prompt was reused, or nothing belongs together.
    """
    kept = [row for row in rows if row.get("role") != "do nothing"]
    found = False
    for prompt in kept:
        if not prompt["n_prompt"] or prompt["n_output"]:
            continue
        if prompt["prompt_n"] is not None and prompt["prompt_n"] < prompt["n_prompt"]:
            raise RequestError(
                f"{prompt['test']}: {prompt['cache_n']} of its tokens came from a cache, so it "
                "does not tell what prefill takes; measure with --cold"
            )
        for decode in kept:
            if decode["n_prompt"] == 0 and all(decode.get(key) == prompt.get(key) for key in ARM):
                found = True
                yield _problem(prompt, decode, output or decode["n_output"])
    if not found:
        raise RequestError(
            "bench: no prompt (pp) and output (tg) of the same arm and depth are in it; measure "
            "both"
        )


def _problem(prompt: Row, decode: Row, output: int) -> Problem:
    """Decode takes least where its rate is the highest and prefill the slowest."""
    prefill = {part: prompt[f"ttft_{part}"] for part in ("median", "least", "most")}
    tokens = {part: output / decode[f"rate_{part}"] for part in ("median", "least", "most")}

    def share(of_decode: float, of_prefill: float) -> float:
        return of_decode / (of_decode + of_prefill)

    shares = (
        share(tokens["median"], prefill["median"]),
        share(tokens["most"], prefill["most"]),
        share(tokens["least"], prefill["least"]),
    )
    return Problem(
        prompt,
        prompt["attention"],
        prompt["n_prompt"],
        output,
        prefill["median"],
        tokens["median"],
        shares,
        min(prompt["repetitions"], decode["repetitions"]),
    )
