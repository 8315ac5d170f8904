"""A guessing game: the policy calls ``guess`` and is told whether the number is higher or lower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from zlib import crc32

from oncurve.core.errors import DataError
from oncurve.tasks.word_problems import SPLIT_OF_TENTH

HIGHEST = 31
GAMES = 10_000
"""Games have numbers below this; a game's number says nothing of the secret one."""
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
    """The first ``count`` games of a split, which shares no game's number with another.

    Each 32 games in a row have every secret once, so that a share of 480 of them is exact for one strategy.
    """
    rng = Random(f"number games {split} {seed}")
    games = _games_of(split)
    rng.shuffle(games)
    made: list[NumberGame] = []
    secrets: list[int] = []
    for place, number in enumerate(games[:count]):
        if place % (HIGHEST + 1) == 0:
            secrets = rng.sample(range(HIGHEST + 1), HIGHEST + 1)
        secret = secrets[place % (HIGHEST + 1)]
        made.append(NumberGame(QUESTION.format(number=number, highest=HIGHEST), str(secret), secret))
    return made


def lessons(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Games without calls in which every guess is still possible: what "higher" and "lower" leave."""
    rng, games = Random(f"game lessons {seed}"), _games_of("train")
    pairs: list[Demonstration] = []
    for _ in range(count):
        parts: list[Part] = []
        for guess, told in _game(rng, inside=1.0, first_inside=1.0):
            parts += [(f" {guess}", True), (f"<result>{told}</result>", False)]
        pairs.append((_prompt(rng, games), tuple(parts)))
    return pairs


def demonstrations(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Games by people who mostly remember what they were told, and never search by halves."""
    rng, games = Random(f"game demonstrations {seed}"), _games_of("train")
    pairs: list[Demonstration] = []
    for _ in range(count):
        parts: list[Part] = []
        for guess, told in _game(rng, inside=0.6, first_inside=0.3):
            parts += [(f"<tool>{guess}</tool>", True), (f"<result>{told}</result>", False)]
        pairs.append((_prompt(rng, games), tuple(parts)))
    return pairs


def _games_of(split: str) -> list[int]:
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"number games: there is no split {split!r}; use train, validation or test")
    return [number for number in range(GAMES) if SPLIT_OF_TENTH[crc32(str(number).encode()) % 10] == split]


def _prompt(rng: Random, games: list[int]) -> str:
    return PROMPT.format(question=QUESTION.format(number=rng.choice(games), highest=HIGHEST))


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
