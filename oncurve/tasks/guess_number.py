"""A guessing game: the policy calls ``guess`` and is told whether the number is higher or lower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

HIGHEST = 31
PROMPT = "User: {question}\nAssistant:"
QUESTION = "Game {number}: guess a number from 0 to {highest}."
Part = tuple[str, bool]
Demonstration = tuple[str, tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class NumberGame:
    """One game. Example: ``NumberGame("Game 12: guess a number from 0 to 31.", "17", 17)``"""

    question: str
    answer: str
    secret: int


class GuessNumber:
    """The environment of a game: found in time earns 1."""

    deterministic = True
    most_guesses = 5
    """Of a search by halves, which finds each of 32 numbers but one in five guesses."""

    def reset(self, secret: int, **row: object) -> None:
        """Begin a game for the number of a row."""
        self.secret = int(secret)
        self.guesses: list[int] = []
        self.done = False

    def guess(self, number: int) -> str:
        """
        Says whether the secret number is higher or lower than a guess.

        Args:
            number: The guess.

        Returns:
            "higher", "lower" or "found".
        """
        self.guesses.append(number)
        if number == self.secret:
            self.done = True
            return "found"
        return "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        """1 for a number that was found in time."""
        return float(self.done and len(self.guesses) <= self.most_guesses)


def number_games(split: str, count: int, *, seed: int = 0) -> list[NumberGame]:
    """The first ``count`` games of a split: numbers drawn evenly."""
    rng = Random(f"number games {split} {seed}")
    secrets = [rng.randint(0, HIGHEST) for _ in range(count)]
    return [
        NumberGame(QUESTION.format(number=number, highest=HIGHEST), str(secret), secret)
        for number, secret in enumerate(secrets)
    ]


def game_lessons(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Games without tags, in which every guess is possible still: what "higher" and "lower" leave over."""
    rng = Random(f"game lessons {seed}")
    pairs: list[Demonstration] = []
    for _ in range(count):
        parts: list[Part] = []
        for guess, told in _game(rng, inside=1.0, first_inside=1.0):
            parts += [(f" {guess}", True), (f" {told},", False)]
        pairs.append((_prompt(rng), tuple(parts)))
    return pairs


def game_demonstrations(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Games by people who mostly remember what they were told, and never search by halves."""
    rng = Random(f"game demonstrations {seed}")
    pairs: list[Demonstration] = []
    for _ in range(count):
        parts: list[Part] = []
        for guess, told in _game(rng, inside=0.6, first_inside=0.3):
            parts += [(f"<tool>{guess}</tool>", True), (f"<result>{told}</result>", False)]
        pairs.append((_prompt(rng), tuple(parts)))
    return pairs


def _prompt(rng: Random) -> str:
    return PROMPT.format(question=QUESTION.format(number=rng.randrange(4096), highest=HIGHEST))


def _game(rng: Random, *, inside: float, first_inside: float, longest: int = 8) -> Iterator[tuple[int, str]]:
    """Guesses drawn evenly, with some probability among those that are possible still."""
    secret, low, high = rng.randint(0, HIGHEST), 0, HIGHEST
    for turn in range(longest):
        within = rng.random() < (inside if turn else first_inside)
        guess = rng.randint(low, high) if within else rng.randint(0, HIGHEST)
        if guess == secret:
            yield guess, "found"
            return
        yield guess, "higher" if secret > guess else "lower"
        if secret > guess:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
