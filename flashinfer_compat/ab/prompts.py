"""The prompts: built in, or from a file."""

from __future__ import annotations

import json
from pathlib import Path

from flashinfer_compat.ab.printable import can_be_sent
from flashinfer_compat.errors import ArgumentError

__all__ = ["BUILT_IN", "read_prompts"]

BUILT_IN = (
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "List the first ten prime numbers, separated by commas:",
    "What is 17 times 23? Think step by step.",
    "A train leaves at 9:40 and arrives at 13:15. How long does the trip take?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "def quicksort(values):\n",
    "SELECT name, COUNT(*) FROM orders",
    "Translate to German: The weather is nice today, and we are going for a walk.",
    "Traduis en anglais : Il n'y a pas de fumée sans feu.",
    "请用一句话介绍北京。",
    "日本で一番高い山は何ですか。",
    "Summarize the plot of Romeo and Juliet in three sentences.",
    "Once upon a time, in a village by the sea,",
    "Write a haiku about autumn.",
    "Give three reasons for and three against working from home.",
    "What is the difference between a virus and a bacterium?",
    "In what year did the first human walk on the Moon, and who was it?",
    "Continue the sequence: 1, 4, 9, 16, 25,",
    '{"name": "Ada", "born": 1815, "languages": [',
    "If all roses are flowers and some flowers fade quickly, can we conclude that some roses fade quickly?",
    "Rewrite more politely: Send me the report now.",
    "Name the planets of the solar system in order from the Sun.",
    "How many letters r are in the word strawberry?",
)
"""Short questions, text to continue, code and other languages: many different tokens, so many different experts."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file.

    In a file named *.jsonl each line is a JSON string, or an object with the string `prompt`; any other file holds one
    prompt a line. Empty lines are left out.

    Raises:
        ArgumentError: It cannot be read, has no prompt, or a line is not in the form.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--prompts", "a file of text in UTF-8", f"{path} ({error})") from error
    # Not splitlines: U+2028 and others are part of a prompt.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ArgumentError("--prompts", "at least one prompt", f"{path}, which has none")
    if path.suffix != ".jsonl":
        return tuple(line for _, line in lines)
    return tuple(_prompt(path, number, line) for number, line in lines)


def _prompt(path: Path, number: int, line: str) -> str:
    expected = 'a JSON string, or an object with the string "prompt", in each line'
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"--prompts: {path}, line {number}", expected, f"no JSON ({error})") from error
    prompt = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(prompt, str) or not prompt:
        raise ArgumentError(f"--prompts: {path}, line {number}", expected, line[:80])
    if not can_be_sent(prompt):
        whole = "text without a lone surrogate, which no server can be sent"
        raise ArgumentError(f"--prompts: {path}, line {number}", whole, line[:80])
    return prompt
