"""Prompts with choices: ``a {red|blue} ball``, and comments as in C.

The frontend chooses by chance. Here the first choice is taken, so that a workflow is the same
prompt every time.
"""

from __future__ import annotations

import re

COMMENT = re.compile(r"/\*[\s\S]*?\*/|//.*")
ESCAPED = re.compile(r"\\([{}|])")


def first_choice(text: str) -> str:
    text = COMMENT.sub("", text)
    chosen: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == "{":
            choice, at = _choice(text, at + 1)
            chosen.append(first_choice(choice))
        else:
            length = 2 if text[at] == "\\" else 1
            chosen.append(text[at : at + length])
            at += length
    return ESCAPED.sub(r"\1", "".join(chosen))


def _choice(text: str, begin: int) -> tuple[str, int]:
    """The first choice of the block that begins there, and where the text goes on after it."""
    depth, at, end = 0, begin, None
    while at < len(text):
        character = text[at]
        if character == "|" and not depth and end is None:
            end = at
        elif character == "}" and not depth:
            return text[begin : at if end is None else end], at + 1
        depth += (character == "{") - (character == "}")
        at += 2 if character == "\\" else 1
    return text[begin:end], len(text)
