"""The texts that are asked: short ones, long ones, and questions on one document."""

from __future__ import annotations

import random

__all__ = ["document_questions", "fillers", "generation_prompts", "probe_prompt", "words"]

_WORDS = """
time people way water day part word number sound work place year back thing name
sentence man line boy farm cow end men land home hand picture air animal page letter
answer house point study learn world kind city self father tree change light head stand
start turn earth fire south problem piece told knew pass since top whole king street
inch nothing course stay wheel full force blue object decide surface deep moon island
foot system busy test record boat gold
""".split()  # noqa: SIM905 - words to read, not a list to edit
_QUESTIONS = (
    "What does the first part say?",
    "Which of the words comes last?",
    "How often is water named here?",
    "Who is it that this is about?",
)
_SHORT = (
    "The sun rises in the",
    "def main(arguments):",
    "Once upon a time there was",
    "import os\nimport sys\n",
    "One, two, three, four,",
    "The quick brown fox jumps over",
)
_FILLER_WORDS = (300, 900, 1800)
_DOCUMENT_WORDS = 1300


def words(seed: int, count: int) -> str:
    """So many words, the same for the same seed."""
    source = random.Random(seed)
    return " ".join(source.choice(_WORDS) for _ in range(count))


def fillers(seed: int = 1) -> list[str]:
    """Long texts of several lengths."""
    return [words(seed * 100 + count, count) for count in _FILLER_WORDS]


def generation_prompts() -> list[str]:
    """Six short prompts, then the long ones."""
    return [*_SHORT, *fillers()]


def document_questions(seed: int = 3) -> list[str]:
    """Four questions, each after the same document."""
    document = words(seed, _DOCUMENT_WORDS)
    return [f"{document}\n\n{question}" for question in _QUESTIONS]


def probe_prompt() -> str:
    """One text whose answer must stay the same whatever else happened."""
    return words(77, 120)
