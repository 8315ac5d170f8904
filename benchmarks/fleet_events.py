"""Discrete-event simulation: a clock, waits, and work that slows down when it is shared."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(eq=False, slots=True)
class Event:
    """Something that will be called when its time has come."""

    then: Callable[[], None]
    is_cancelled: bool = False
    done: Callable[[], None] = lambda: None
    """Called once when it is over, whether it came or was cancelled."""

    def cancel(self) -> None:
        """It will not happen."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.done()


class Signal:
    """Something to wait for; once fired it stays so."""

    def __init__(self) -> None:
        self.fired = False
        self._then: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Let everybody go on who waits."""
        self.fired = True
        then, self._then = self._then, []
        for call in then:
            call()

    def when_fired(self, call: Callable[[], None]) -> None:
        """Call something then, or now if it was fired before."""
        if self.fired:
            call()
        else:
            self._then.append(call)


class Clock:
    """Time, and what is due. Everything due at the same moment happens in the order in which it was planned."""

    def __init__(self, share: Callable[[int], float] = lambda busy: 1.0) -> None:
        """``share`` gives the speed of each of so many that work at the same time."""
        self.now = 0.0
        self.work = 0.0
        """Seconds of work that anybody who worked all the time would have done."""
        self._share = share
        self._busy = 0
        self._waits: list[tuple[float, int, Event]] = []
        self._works: list[tuple[float, int, Event]] = []
        self._number = 0

    def wait(self, seconds: float, then: Callable[[], None]) -> Event:
        """Call something after so many seconds."""
        return self._plan(self._waits, self.now + seconds, Event(then))

    def compute(self, seconds: float, then: Callable[[], None]) -> Event:
        """Call something after so many seconds of work, which take longer where they are shared."""
        self._busy += 1
        return self._plan(self._works, self.work + seconds, Event(then, done=self._rest))

    def waited(self, seconds: float) -> Signal:
        """A signal after so many seconds."""
        signal = Signal()
        self.wait(seconds, signal.fire)
        return signal

    def computed(self, seconds: float) -> Signal:
        """A signal after so many seconds of work."""
        signal = Signal()
        self.compute(seconds, signal.fire)
        return signal

    def process(self, steps: Generator[Signal]) -> Signal:
        """Run a generator that yields what it waits for; the signal of its end."""
        ended = Signal()

        def go_on() -> None:
            for signal in steps:
                if not signal.fired:
                    signal.when_fired(go_on)
                    return
            ended.fire()

        go_on()
        return ended

    def run(self, until: Signal) -> None:
        """Let time pass until a signal. Raises RuntimeError if nothing is due any more and it was never fired."""
        while not until.fired:
            if not self._advance():
                raise RuntimeError("everybody waits, and nothing is due")

    def _plan(self, heap: list[tuple[float, int, Event]], at: float, event: Event) -> Event:
        self._number += 1
        heappush(heap, (at, self._number, event))
        return event

    def _rest(self) -> None:
        self._busy -= 1

    def _advance(self) -> bool:
        for heap in (self._waits, self._works):
            while heap and heap[0][2].is_cancelled:
                heappop(heap)
        share = self._share(self._busy) if self._busy else 1.0
        until_wait = self._waits[0][0] - self.now if self._waits else None
        until_work = (self._works[0][0] - self.work) / share if self._works else None
        if until_wait is None and until_work is None:
            return False
        is_work = until_wait is None or (until_work is not None and until_work <= until_wait)
        seconds = max(0.0, until_work if is_work else until_wait)  # type: ignore[type-var]
        self.now += seconds
        self.work += seconds * share if self._busy else 0.0
        at, _, event = heappop(self._works if is_work else self._waits)
        if is_work:
            self.work = at
        else:
            self.now = at
        event.is_cancelled = True
        event.done()
        event.then()
        return True
