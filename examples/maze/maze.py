"""A maze with hidden walls: the policy calls ``go`` and is told where it stands, or that there is a wall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from zlib import crc32

from oncurve.core.errors import DataError
from oncurve.tasks.word_problems import SPLIT_OF_TENTH

SIZE = 6
NUM_WALLS = 6
SHORTEST = 3
"""Steps from the start to the exit, at least."""
PROMPT = "User: {question}\nAssistant:"
QUESTION = "Maze: you are at {start}, the exit is at {exit}."
MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
Place = tuple[int, int]
Part = tuple[str, bool]
Demonstration = tuple[str, tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class MazeProblem:
    """One maze. Example: ``MazeProblem("Maze: you are at 0,3, ...", "4,1", "0,3", "4,1", "2,2 5,0")``"""

    question: str
    answer: str
    start: str
    exit: str
    walls: str


class Maze:
    """The environment of a maze: out within ``spare_moves`` of the shortest way earns 1."""

    deterministic = True
    spare_moves = 4
    """What bumping into the hidden walls may cost."""

    def reset(self, start: str, exit: str, walls: str, **row: object) -> None:
        """Stand at the start of a row's maze."""
        self.place, self.exit = _place(start), _place(exit)
        self.walls = frozenset(map(_place, walls.split()))
        self.most_moves = distance(self.place, self.exit, self.walls) + self.spare_moves
        self.num_moves = 0
        self.done = False

    def go(self, direction: str) -> str:
        """
        Goes one step.

        Args:
            direction: north, south, east or west.

        Returns:
            Where that leads, "wall" or "out".
        """
        if direction not in MOVES:
            raise ValueError(f"there is no direction {direction[:20]!r}; go north, south, east or west")
        self.num_moves += 1
        reached = _step(self.place, direction)
        if not _is_free(reached, self.walls):
            return "wall"
        self.place = reached
        self.done = self.place == self.exit
        return "out" if self.done else _name(self.place)

    def get_reward(self) -> float:
        """1 for being out in time."""
        return float(self.done and self.num_moves <= self.most_moves)


def mazes(split: str, count: int, *, seed: int = 0) -> list[MazeProblem]:
    """The first ``count`` mazes of a split, which shares no start and exit with another."""
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"mazes: there is no split {split!r}; use train, validation or test")
    rng = Random(f"mazes {split} {seed}")
    made: list[MazeProblem] = []
    while len(made) < count:
        start, exit, walls = _draw(rng)
        if _split_of(start, exit) == split:
            made.append(
                MazeProblem(
                    QUESTION.format(start=_name(start), exit=_name(exit)),
                    _name(exit),
                    _name(start),
                    _name(exit),
                    " ".join(_name(wall) for wall in sorted(walls)),
                )
            )
    return made


def lessons(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Which ways lead nearer to the exit, from places anywhere, without tags and without going."""
    rng = Random(f"maze lessons {seed}")
    pairs: list[Demonstration] = []
    for start, exit, _ in _of_training(rng, count):
        parts: list[Part] = []
        for _ in range(6):
            place = rng.randrange(SIZE), rng.randrange(SIZE)
            if place != exit:
                parts += [(f" {_name(place)}", False), (f" {' '.join(_nearer(place, exit))},", True)]
        pairs.append((_prompt(start, exit), tuple(parts) or ((" here", True),)))
    return pairs


def demonstrations(count: int, *, seed: int = 0, sense: float = 0.35) -> list[Demonstration]:
    """Walks of people who mostly go anywhere, and with probability ``sense`` a step that leads nearer to the exit.

    They do not run into the same wall twice in a row.
    """
    rng = Random(f"maze demonstrations {seed}")
    pairs: list[Demonstration] = []
    for start, exit, walls in _of_training(rng, count):
        parts: list[Part] = []
        place, blocked = start, set[str]()
        for _ in range(14):
            ways = _nearer(place, exit) if rng.random() < sense else list(MOVES)
            way = rng.choice([one for one in ways if one not in blocked] or sorted(MOVES.keys() - blocked))
            reached = _step(place, way)
            is_free = _is_free(reached, walls)
            blocked = set() if is_free else {*blocked, way}
            place = reached if is_free else place
            told = "out" if place == exit else _name(place) if is_free else "wall"
            parts += [(f"<tool>{way}</tool>", True), (f"<result>{told}</result>", False)]
            if place == exit:
                break
        pairs.append((_prompt(start, exit), tuple(parts)))
    return pairs


def distance(start: Place, exit: Place, walls: frozenset[Place]) -> int:
    """Steps of the shortest way; -1 if there is none."""
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        place = waiting.popleft()
        if place == exit:
            return found[place]
        for way in MOVES:
            reached = _step(place, way)
            if _is_free(reached, walls) and reached not in found:
                found[reached] = found[place] + 1
                waiting.append(reached)
    return -1


def _draw(rng: Random) -> tuple[Place, Place, frozenset[Place]]:
    """A start, an exit that can be reached, and walls."""
    places = [(column, row) for column in range(SIZE) for row in range(SIZE)]
    while True:
        start, exit, *walls = rng.sample(places, NUM_WALLS + 2)
        if distance(start, exit, frozenset(walls)) >= SHORTEST:
            return start, exit, frozenset(walls)


def _of_training(rng: Random, count: int) -> Iterator[tuple[Place, Place, frozenset[Place]]]:
    while count:
        start, exit, walls = _draw(rng)
        if _split_of(start, exit) == "train":
            count -= 1
            yield start, exit, walls


def _split_of(start: Place, exit: Place) -> str:
    return SPLIT_OF_TENTH[crc32(f"{_name(start)} {_name(exit)}".encode()) % 10]


def _nearer(place: Place, exit: Place) -> list[str]:
    """The ways that lead nearer to the exit where there are no walls."""
    return [
        way
        for way, (right, down) in MOVES.items()
        if (exit[0] - place[0]) * right > 0 or (exit[1] - place[1]) * down > 0
    ]


def _step(place: Place, way: str) -> Place:
    right, down = MOVES[way]
    return place[0] + right, place[1] + down


def _is_free(place: Place, walls: frozenset[Place]) -> bool:
    return 0 <= place[0] < SIZE and 0 <= place[1] < SIZE and place not in walls


def _place(name: str) -> Place:
    column, _, row = name.partition(",")
    return int(column), int(row)


def _name(place: Place) -> str:
    return f"{place[0]},{place[1]}"


def _prompt(start: Place, exit: Place) -> str:
    return PROMPT.format(question=QUESTION.format(start=_name(start), exit=_name(exit)))
