"""Simulation of a trainer and its rollout servers, event by event, under a run's own rules.

Kept of the product: a prompt's whole group goes to the ready server with the fewest tokens outstanding, up to a limit
of rows; a server decodes all of its rows together and answers a group when its last row ends; weights are written by
the trainer and fetched by all servers at the same time; a step begins when the first server has them and the others
had as long again; what a lost server had is sampled again from the beginning. Left out: refills, measurements,
checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from fleet_events import Clock, Event, Signal

Lengths = Callable[[Random], float]
"""Draws the tokens of a completion."""
PUBLISH_SLACK_SECONDS = 0.25
"""What servers that are late with new weights get on top of the first one's time: as in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds of everything that takes time, each on a machine of its own."""

    turn_seconds: float
    """A decoding turn, one more token for every running row, before its rows count: the weights are read."""
    row_seconds: float = 0.0
    """What each running row adds to a turn: its keys and values are read."""
    row_least_seconds: float = 0.0
    """A turn takes at least this for each of its rows: its arithmetic."""
    prompt_seconds: float = 0.0
    """Reading one prompt, for which the rows of the server stand still."""
    answer_seconds: float = 0.0
    """From the end of a group on its server until the trainer has it."""
    train_seconds: float = 0.0
    """Grading a step, and training on it."""
    write_seconds: float = 0.0
    """Making new weights ready to be fetched; the trainer waits."""
    load_seconds: float = 0.0
    """Putting fetched weights to use; the server stands still."""

    def turn(self, rows: int) -> float:
        """max(turn + rows x row, rows x row at least), arXiv:2211.05102, section 2."""
        return max(self.turn_seconds + rows * self.row_seconds, rows * self.row_least_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How weights travel."""

    sync_bytes: float = 0.0
    """Of one version: all weights, what changed of them, or an adapter."""
    server_rate: float = math.inf
    """Bytes per second that one server takes."""
    trainer_rate: float = math.inf
    """Bytes per second that the trainer, or the disk in its place, gives to all together."""
    has_relay: bool = False
    """One server fetches from the trainer, and gives to the others: ``rollouts.deltas.relay``."""

    def fetch_seconds(self, servers: int) -> float:
        """Of each of so many servers that fetch at the same time: max(bytes / own rate, servers x bytes / shared).

        With a relay the trainer's link carries them once, and the relay's own link then carries them to the others.
        """
        if self.has_relay and servers > 1:
            first = self.sync_bytes / min(self.server_rate, self.trainer_rate)
            return first + (servers - 1) * self.sync_bytes / self.server_rate
        return max(self.sync_bytes / self.server_rate, servers * self.sync_bytes / self.trainer_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Servers that vanish, as spot machines do."""

    per_hour: float
    """Of one server, on average."""
    notice_seconds: float = 10.0
    """Until the trainer counts it as lost: ``rollouts.deadlines.silent_seconds``."""
    back_seconds: float = 300.0
    """Until another machine stands in its place, with the base's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLayout:
    """Who takes part, and what they have to do."""

    servers: int
    prompts: int
    """Of a step, P."""
    group_size: int
    max_rows: int
    """Completions asked of one server at a time, in whole groups."""
    lengths: Lengths
    steps: int = 20
    staleness: int = 0
    """1: the next step is sampled while this one trains."""
    seed: int = 0
    shared_cores: int | None = None
    """Cores of the one machine on which all of this runs, a thread each; None: everybody has a machine."""
    beside: float = 1.0
    """Share of its speed that a thread keeps when another one works beside it on such a machine."""
    losses: Losses | None = None


@dataclass(slots=True)
class Simulated:
    """What came of it."""

    step_seconds: list[float] = field(default_factory=list)
    """Of every step but the first, which has nothing to sample from before it."""
    wait_seconds: list[float] = field(default_factory=list)
    """Of these steps: the trainer waits for completions."""
    sync_seconds: list[float] = field(default_factory=list)
    """Of these steps: the trainer writes weights, and waits until servers have them."""
    completions: int = 0
    """That were trained on."""
    tokens: float = 0.0
    """Of these completions."""
    sampled_again: int = 0
    """Completions asked for once more because their server was lost."""
    losses: int = 0
    server_busy_fraction: float = 0.0
    """Share of all servers' time, lost ones' absence included, in which something was sampled."""

    @property
    def seconds(self) -> float:
        """Mean of a step."""
        return sum(self.step_seconds) / len(self.step_seconds)

    @property
    def trainer_idle_fraction(self) -> float:
        """Share of the time in which the trainer waits for completions or for servers to have new weights."""
        return (sum(self.wait_seconds) + sum(self.sync_seconds)) / sum(self.step_seconds)

    @property
    def server_idle_fraction(self) -> float:
        """Share of the servers' time in which they sample nothing: they wait, take weights, or are gone."""
        return 1.0 - self.server_busy_fraction


def simulate(layout: FleetLayout, speeds: Speeds, network: Network | None = None) -> Simulated:
    """Play a run through. The same arguments give the same result, and completions of the same lengths whatever the
    number of servers.

    Raises ValueError for fewer than two steps, or without servers.
    """
    if layout.steps < 2 or layout.servers < 1:
        raise ValueError(f"{layout.steps} steps on {layout.servers} servers: at least two steps and one server")
    return _Run(layout, speeds, network or Network()).play()


def cut_lognormal(mean: float, spread: float, limit: float) -> Lengths:
    """Ragged lengths: log-normal, cut off at the limit, with this mean after the cut.

        E[min(X, L)] = e^(m + s^2 / 2) Phi((ln L - m) / s - s) + L (1 - Phi((ln L - m) / s)),  s^2 = ln(1 + spread^2)

    ``spread`` is the standard deviation before the cut as a share of the mean; 0 gives every completion the mean.
    """
    if spread == 0 or mean >= limit:
        return lambda random: min(mean, limit)
    sigma = math.sqrt(math.log1p(spread**2))

    def cut_mean(location: float) -> float:
        edge = (math.log(limit) - location) / sigma
        return math.exp(location + sigma**2 / 2) * _phi(edge - sigma) + limit * (1 - _phi(edge))

    low, high = math.log(mean) - 20 * sigma, math.log(limit) + 20 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return lambda random: min(limit, max(1.0, random.lognormvariate(low, sigma)))


def _phi(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


@dataclass(eq=False, slots=True)
class _Group:
    """The completions of one prompt."""

    lengths: tuple[float, ...]
    unfinished: int = 0


class _Server:
    """Rows that run together. Turns are counted without end; a row leaves at the turn of its last token."""

    def __init__(self, clock: Clock, speeds: Speeds, give: Callable[[_Server, _Group], None]) -> None:
        self.clock, self.speeds, self._give = clock, speeds, give
        self.version, self.is_up, self.is_ready = -1, True, False
        self.outstanding: dict[_Group, float] = {}
        self.busy_seconds = 0.0
        self._rows: list[tuple[float, int, _Group]] = []
        self._turns, self._reading, self._since, self._number = 0.0, 0.0, 0.0, 0
        self._event: Event | None = None
        self._busy_since = 0.0

    @property
    def outstanding_rows(self) -> int:
        return sum(len(group.lengths) for group in self.outstanding)

    def take(self, group: _Group, cost: float) -> None:
        """Begin with a group: its prompt is read, and its rows join."""
        self._settle()
        if not self._rows:
            self._busy_since = self.clock.now
        self.outstanding[group] = cost
        group.unfinished = len(group.lengths)
        for length in group.lengths:
            self._number += 1
            heappush(self._rows, (self._turns + length, self._number, group))
        self._reading += self.speeds.prompt_seconds
        self._go_on()

    def lose(self) -> list[_Group]:
        """End all at once; the groups that were not answered."""
        self._settle()
        if self._rows:
            self.busy_seconds += self.clock.now - self._busy_since
        groups, self._rows, self._reading, self.outstanding = list(self.outstanding), [], 0.0, {}
        self.is_up = self.is_ready = False
        self.version = -1
        return groups

    def _settle(self) -> None:
        """Count what was done since the last event."""
        if self._event is None:
            return
        self._event.cancel()
        self._event = None
        done = self.clock.work - self._since
        read = min(done, self._reading)
        self._reading -= read
        turn = self.speeds.turn(len(self._rows))
        if turn:
            self._turns += (done - read) / turn

    def _go_on(self) -> None:
        if self._rows:
            self._since = self.clock.work
            seconds = (self._rows[0][0] - self._turns) * self.speeds.turn(len(self._rows))
            self._event = self.clock.compute(self._reading + max(seconds, 0.0), self._row_ends)

    def _row_ends(self) -> None:
        self._event, self._reading, self._turns = None, 0.0, self._rows[0][0]
        while self._rows and self._rows[0][0] <= self._turns:
            group = heappop(self._rows)[2]
            group.unfinished -= 1
            if not group.unfinished:
                self.clock.wait(self.speeds.answer_seconds, lambda group=group: self._answer(group))
        if not self._rows:
            self.busy_seconds += self.clock.now - self._busy_since
        self._go_on()

    def _answer(self, group: _Group) -> None:
        if group in self.outstanding:  # not lost in the meantime
            del self.outstanding[group]
            self._give(self, group)


class _Run:
    """One run in the making."""

    def __init__(self, layout: FleetLayout, speeds: Speeds, network: Network) -> None:
        self.layout, self.speeds, self.network = layout, speeds, network
        self.found = Simulated()
        self.clock = Clock(self._share)
        self.servers = [_Server(self.clock, speeds, self._answered) for _ in range(layout.servers)]
        self.waiting: deque[_Group] = deque()
        self.missing = 0
        self.sampled: Signal = Signal()
        self.synced: Signal = Signal()
        self.version = -1
        self._first_ready: float | None = None
        self._sync_started = 0.0

    def _share(self, busy: int) -> float:
        """Speed of each of so many busy threads."""
        cores = self.layout.shared_cores
        return 1.0 if cores is None or busy < 2 else self.layout.beside * min(1.0, cores / busy)

    def play(self) -> Simulated:
        ended = self.clock.process(self._train())
        if self.layout.losses is not None:
            for number, server in enumerate(self.servers):
                self.clock.process(self._die(server, Random(f"{self.layout.seed}:server:{number}"), self.layout.losses))
        self.clock.run(ended)
        busy = sum(server.busy_seconds for server in self.servers)
        self.found.server_busy_fraction = busy / (self.layout.servers * self.clock.now)
        return self.found

    def _train(self) -> Generator[Signal]:
        """The loop of the trainer; one step ahead as ``oncurve.rollouts.prefetch`` is."""
        layout, ahead = self.layout, None
        for step in range(layout.steps):
            started, synced, waited = self.clock.now, 0.0, 0.0
            if layout.staleness and step:
                assert ahead is not None
                yield ahead
                waited = self.clock.now - started
            before = self.clock.now
            yield from self._sync(step)
            synced = self.clock.now - before
            if not (layout.staleness and step):
                before = self.clock.now
                yield self._sample(step)
                waited = self.clock.now - before
            self.found.completions += layout.prompts * layout.group_size
            self.found.tokens += sum(sum(group.lengths) for group in self._groups(step))
            if layout.staleness and step + 1 < layout.steps:
                ahead = self._sample(step + 1)
            yield self.clock.computed(self.speeds.train_seconds)
            if step:
                self.found.step_seconds.append(self.clock.now - started)
                self.found.wait_seconds.append(waited)
                self.found.sync_seconds.append(synced)

    def _groups(self, step: int) -> list[_Group]:
        """A function of seed and step, so that any number of servers has the same to do."""
        random, layout = Random(f"{self.layout.seed}:{step}"), self.layout
        return [_Group(tuple(layout.lengths(random) for _ in range(layout.group_size))) for _ in range(layout.prompts)]

    def _sample(self, step: int) -> Signal:
        groups = self._groups(step)
        self.missing, self.sampled = len(groups), Signal()
        self.waiting.extend(groups)
        self._hand_out()
        return self.sampled

    def _hand_out(self) -> None:
        while self.waiting:
            free = [one for one in self.servers if one.is_ready and one.outstanding_rows < self.layout.max_rows]
            if not free:
                return
            best = min(free, key=lambda one: (sum(one.outstanding.values()), one.outstanding_rows))
            group = self.waiting.popleft()
            best.take(group, cost=float(len(group.lengths)))  # the trainer knows no lengths, and counts the limit

    def _answered(self, server: _Server, group: _Group) -> None:
        self.missing -= 1
        self._hand_out()
        if not self.missing:
            self.sampled.fire()

    def _sync(self, version: int) -> Generator[Signal]:
        """Write a version, and wait until servers have it: all, or the first and a while."""
        yield self.clock.computed(self.speeds.write_seconds)
        self.version, self.synced = version, Signal()
        self._first_ready, self._sync_started = None, self.clock.now
        up = [server for server in self.servers if server.is_up]
        for server in self.servers:
            server.is_ready = False
        for server in up:
            self.clock.process(self._fetch(server, len(up)))
        yield self.synced

    def _fetch(self, server: _Server, together: int) -> Generator[Signal]:
        version = self.version
        yield self.clock.waited(self.network.fetch_seconds(together))
        yield self.clock.computed(self.speeds.load_seconds)
        if server.is_up and version == self.version:
            server.version, server.is_ready = version, True
            if self._first_ready is None:
                self._first_ready = self.clock.now
                grace = self.clock.now - self._sync_started + PUBLISH_SLACK_SECONDS
                self.clock.wait(grace, lambda: self._check_synced(version, is_late=True))
            self._check_synced(version, is_late=False)
            self._hand_out()

    def _check_synced(self, version: int, *, is_late: bool) -> None:
        up = [server for server in self.servers if server.is_up]
        ready = [server for server in up if server.is_ready]
        if version == self.version and ready and (is_late or len(ready) == len(up)) and not self.synced.fired:
            self.synced.fire()

    def _die(self, server: _Server, random: Random, losses: Losses) -> Generator[Signal]:
        """Vanish and come back, again and again."""
        while True:
            yield self.clock.waited(random.expovariate(losses.per_hour / 3600))
            groups = server.lose()
            self.found.losses += 1
            self.found.sampled_again += sum(len(group.lengths) for group in groups)
            yield self.clock.waited(losses.notice_seconds)
            self.waiting.extendleft(reversed(groups))
            self._hand_out()
            yield self.clock.waited(max(0.0, losses.back_seconds - losses.notice_seconds))
            server.is_up = True
            if self.version >= 0:
                yield from self._fetch(server, 1)
