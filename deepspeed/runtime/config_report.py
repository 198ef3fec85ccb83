"""Collector of what is wrong in a configuration, so that a user sees every problem of a file at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from deepspeed.errors import DeepSpeedConfigError

SHOWN_VALUE_LENGTH = 80


@dataclass(frozen=True)
class Problem:
    """One line of the error text: `path` is the full dotted key, `text` what is wrong with it and what to do."""

    path: str
    text: str
    error: type[DeepSpeedConfigError] = DeepSpeedConfigError

    def __str__(self) -> str:
        return f"{self.path} {self.text}" if self.path else self.text


@dataclass
class Report:
    """Problems and warnings found so far, and where each value of the configuration came from.

    sources: dotted path -> "file", "null" or "auto", for each key that the user wrote (under its current name)."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, text: str, error: type[DeepSpeedConfigError] = DeepSpeedConfigError) -> None:
        self.problems.append(Problem(path, text, error))

    def is_sound(self, paths: Iterable[str]) -> bool:
        """True if no problem so far concerns one of the paths, a block around it or a key inside it."""
        return not any(_overlap(problem.path, path) for path in paths for problem in self.problems)

    def raise_problems(self, origin: str) -> None:
        """Raises DeepSpeedConfigError (or the class that all problems share) with one line per problem.

        origin: what was read, for the first line of the text."""
        if not self.problems:
            return
        kinds = {problem.error for problem in self.problems}
        error = kinds.pop() if len(kinds) == 1 else DeepSpeedConfigError
        lines = list(dict.fromkeys(str(problem) for problem in self.problems))
        if len(lines) == 1:
            raise error(f"{origin}: {lines[0]}")
        raise error("\n  ".join([f"{origin}: {len(lines)} problems", *lines]))


def _overlap(first: str, second: str) -> bool:
    return first == second or first.startswith(second + ".") or second.startswith(first + ".")


def join_path(*parts: str) -> str:
    """Returns the dotted path of the non-empty parts."""
    return ".".join(part for part in parts if part)


def show_value(value: object) -> str:
    """Returns the value as JSON text, cut to a readable length."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[:SHOWN_VALUE_LENGTH - 3] + "..."


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that resembles `word` most (case, "-" and "_" do not count), or None.

    cutoff: least similarity, 0 to 1, as difflib measures it."""
    plain = {_plain(name): name for name in known}
    matches = get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def list_choices(choices: Iterable[str]) -> str:
    """Returns "a, b or c"."""
    *head, last = choices
    return f"{', '.join(head)} or {last}" if head else last
