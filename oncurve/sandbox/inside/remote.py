"""Remote calls between a test and the program that it tests, across two sandboxes.

Both ends are alike: whoever has the word sends a call and then serves the other end's calls until its own is
answered. Values cross as data. What is not data stays where it is and crosses as a reference; the test's end lets
the program call functions that it was given and do nothing else with them.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import io
import operator
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from . import frames
from .caught import Caught, describe
from .codec import MAX_NAME_CHARACTERS, MINE, YOURS, NotData, Payload, decode, encode

MAX_PRINTED_CHARACTERS = 100_000
_ENDS_ITERATION = ("StopIteration", "StopAsyncIteration")


_INPUT = builtins.input


class CallStopped(BaseException):
    """The program did not answer: it ended, ran out of time, or sent what is not data.

    No ``except Exception`` of a test may take this for the exception it was waiting for.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Unsendable(NotData):
    """The test wants to hand the program an object of a class that the program cannot know."""


class RemoteFunction:
    """A function of the other end. It can be called; it equals nothing but itself and is neither true nor false."""

    def __init__(self, peer: Peer, target: int | str) -> None:
        self._peer = peer
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function at its own end."""
        return self._peer.ask(self._target, "call", args, kwargs)

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")


class RemoteCoroutineFunction(RemoteFunction):
    """An ``async def`` of the other end: what it returns can be awaited."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function at its own end."""
        return self._peer.ask(self._target, "call", args, kwargs)


class RemoteObject(RemoteFunction):
    """An object of the program whose class the test names.

    Its own comparisons decide among such objects only, and its operators give data only for such objects: otherwise an
    object could compare as equal, less or near to whatever a test expects.
    """

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask(self._target, "get", (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_peer", "_target"):
            object.__setattr__(self, name, value)
        else:
            self._peer.ask(self._target, "set", (name, value))

    def __len__(self) -> int:
        return self._peer.ask(self._target, "len")

    def __iter__(self) -> Any:
        return iter(self._peer.ask(self._target, "list"))

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask(self._target, "item", (key,))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask(self._target, "set_item", (key, value))

    def __str__(self) -> str:
        return self._peer.ask(self._target, "str")

    def __repr__(self) -> str:
        return self._peer.ask(self._target, "repr")

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, RemoteObject):
            return self is other
        return self._peer.ask(self._target, "same", (other,)) is True

    def __hash__(self) -> int:
        return self._peer.ask(self._target, "hash")

    def __bool__(self) -> bool:
        return self._peer.ask(self._target, "bool") is True

    def __next__(self) -> Any:
        reply = self._peer.ask(self._target, "next")
        if not reply:
            raise StopIteration
        return reply[0]

    def __enter__(self) -> Any:
        return self._peer.ask(self._target, "enter")

    def __exit__(self, *_: object) -> bool:
        return self._peer.ask(self._target, "exit") is True

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, RemoteObject) and self._peer.ask(self._target, "instance", (instance,)) is True

    def __subclasscheck__(self, kind: object) -> bool:
        return isinstance(kind, RemoteObject) and self._peer.ask(self._target, "subclass", (kind,)) is True

    def __delitem__(self, key: Any) -> None:
        self._peer.ask(self._target, "delete_item", (key,))


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def operate(self: RemoteObject, other: Any) -> Any:
        result = self._peer.ask(self._target, name, (other,))
        if not isinstance(other, RemoteObject) and not isinstance(result, RemoteObject):
            raise TypeError(f"{name} of an object of the program and of data of the test gives no object")
        return result

    return operate


def _unary(name: str) -> Callable[[Any], Any]:
    return lambda self: self._peer.ask(self._target, name)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge")
_UNARY = {
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "abs": abs, "int": int, "float": float,
    "index": operator.index, "round": round,
}  # fmt: skip
for _name in (*_BINARY, *_COMPARISONS):
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _binary(_name))
for _name in _BINARY:
    setattr(RemoteObject, f"__r{_name.rstrip('_')}__", _binary(f"r{_name}"))
for _name in _UNARY:
    setattr(RemoteObject, f"__{_name}__", _unary(_name))


class UnnamedObject(RemoteObject):
    """An object of the program whose class the test does not name: what is read of it is compared as data.

    It has no operators, and no attribute that a plain value has: through ``__sub__`` or ``startswith`` it would learn
    what the test expects of a number or a text, and could say yes to it.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or any(hasattr(kind, name) for kind in _PLAIN):
            raise AttributeError(f"an object of the program has no {name!r} here, since plain values have one")
        return super().__getattr__(name)

    def __bool__(self) -> bool:
        return True

    def __exit__(self, *caught: object) -> bool:
        super().__exit__(*caught)
        return False  # what a test raises is its result


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise TypeError(f"an object of the program has no {name!r} here, since its class is not named in the test")

    return refuse


_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, deque)
for _name in (*_BINARY, *_COMPARISONS, *_UNARY):
    setattr(UnnamedObject, f"__{_name.rstrip('_')}__", _refused(_name))
for _name in _BINARY:
    setattr(UnnamedObject, f"__r{_name.rstrip('_')}__", _refused(_name))


def _next_of(target: Any) -> tuple[Any, ...]:
    for value in target:
        return (value,)
    return ()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "len": len,
    "list": list,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, value: target.__setitem__(key, value),
    "str": str,
    "repr": repr,
    "same": lambda target, other: bool(target == other),
    "hash": hash,
    "bool": bool,
    "next": _next_of,
    "enter": lambda target: target.__enter__(),
    "exit": lambda target: bool(target.__exit__(None, None, None)),
    "instance": lambda target, other: isinstance(other, target),
    "subclass": lambda target, other: issubclass(other, target),
    "delete_item": operator.delitem,
    **_UNARY,
    **{name: getattr(operator, name) for name in (*_BINARY, *_COMPARISONS)},
    **{f"r{name}": lambda target, other, name=name: getattr(operator, name)(other, target) for name in _BINARY},
}


class Peer:
    """One end of the conversation."""

    def __init__(self, fd: int, *, find: Callable[[str], Any] | None = None, is_tested: bool) -> None:
        self._fd = fd
        self._find = find
        self._is_tested = is_tested
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._classes: dict[str, Any] = {}
        self.allows_objects = False
        """Whether classes of the other end are named here, so that their objects may have operators."""
        self.exceptions: dict[str, type[Exception]] = {}
        """Classes to raise for the other end's exceptions, besides the builtin ones."""
        self.num_calls = 0
        """Number of calls to the other end."""

    def name(self, name: str) -> Any:
        """The program's object of a name: data, or a reference.

        Raises NameError if it has no such name.
        """
        return self.ask(name, "name", ())

    def ask(
        self, target: int | str, operation: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The other end's answer; serves its calls while waiting.

        Raises what the operation raised there, or Stopped.
        """
        call = {"k": "call", "to": target, "op": operation}
        try:
            call["args"] = [self._encode(item) for item in args]
            call["kwargs"] = {key: self._encode(item) for key, item in (kwargs or {}).items()}
            if not self._is_tested:
                call |= self._surroundings()
        except NotData as error:
            raise CallStopped("unsendable" if isinstance(error, Unsendable) else "not_data", str(error)) from error
        frames.send(self._fd, call)
        self.num_calls += 1
        reply = self._serve_until_reply()
        if printed := reply.get("printed"):
            sys.stdout.write(printed)
        if reply["k"] == "raise":
            raise self._rebuilt(reply)
        try:
            for local, changed in zip(args, reply["args"], strict=False):  # a hostile program may send too few
                if changed is not None:
                    _replace_content(local, decode(changed, self._resolve))
            return decode(reply["value"], self._resolve)
        except NotData as error:
            raise CallStopped("not_data", str(error)) from error

    def serve(self) -> None:
        """Answers calls until the other end is gone, which raises EOFError."""
        while True:
            self._serve_until_reply()

    def _serve_until_reply(self) -> frames.Frame:
        while True:
            frame = frames.receive(self._fd)
            if frame["k"] == "stop":
                raise CallStopped(frame["kind"], frame["text"])
            if frame["k"] != "call":
                return frame
            frames.send(self._fd, self._performed(frame))

    def _surroundings(self) -> frames.Frame:
        """The input that the test has put in place, for the program to read from."""
        surroundings: frames.Frame = {}
        if builtins.input is not _INPUT:
            surroundings["input"] = self._encode(builtins.input)
        if isinstance(sys.stdin, io.StringIO):
            surroundings["stdin"] = sys.stdin.read()
        return surroundings

    def _performed(self, call: frames.Frame) -> frames.Frame:
        """The reply to a call; what a program prints meanwhile goes with it, and its input comes from the test."""
        if not self._is_tested:
            return self._answered(call)
        streams, printed = (sys.stdin, sys.stdout, builtins.input), io.StringIO()
        with Caught():
            if "input" in call:
                builtins.input = decode(call["input"], self._resolve)
            if "stdin" in call:
                sys.stdin = io.StringIO(call["stdin"])
            sys.stdout = printed
        reply = self._answered(call)
        with Caught():
            reply["printed"] = str(printed.getvalue())[:MAX_PRINTED_CHARACTERS]
        sys.stdin, sys.stdout, builtins.input = streams
        return reply

    def _answered(self, call: frames.Frame) -> frames.Frame:
        with Caught() as caught:
            args = [decode(item, self._resolve) for item in call["args"]]
            value = self._perform(call, args)
            changes = [self._changed(item, before) for item, before in zip(args, call["args"], strict=True)]
            return {"k": "return", "value": self._encode(value), "args": changes}
        error = caught.error or RuntimeError()
        if not self._is_tested and isinstance(error, CallStopped | EOFError):
            raise error
        if self._is_tested and isinstance(error, NotData):
            return {"k": "stop", "kind": "not_data", "text": str(error)}
        return describe(error)

    def _perform(self, call: frames.Frame, args: list[Any]) -> Any:
        target, operation = call["to"], call["op"]
        value = self._objects[target] if isinstance(target, int) else self._find(target) if self._find else None
        if operation == "name" and self._is_tested:
            return value
        if operation == "call" and value is not None:
            kwargs = {key: decode(item, self._resolve) for key, item in call["kwargs"].items()}
            result = value(*args, **kwargs)
            return asyncio.run(result) if inspect.iscoroutine(result) else result
        if not self._is_tested:
            raise TypeError("a function of the test can only be called")
        return _OPERATIONS[operation](value, *args)

    def _changed(self, value: Any, before: Payload) -> Payload:
        """The new content of an argument that the call has changed in place; None if it did not."""
        if not isinstance(value, list | dict | set | bytearray | deque):
            return None
        after = self._encode(value)
        return None if after == before else after

    def _encode(self, value: Any) -> Payload:
        return encode(value, self._export)

    def _export(self, value: Any) -> Payload:
        if isinstance(value, RemoteFunction):
            return [YOURS, value._target, "object"]
        is_function = callable(value) and (not isinstance(value, type) or not self._is_tested)
        if not is_function and not self._is_tested:
            raise Unsendable(f"an object of the test of type {type(value).__name__} cannot be sent to the program")
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if inspect.iscoroutinefunction(value):
            return [MINE, number, "async"]
        if is_function:
            return [MINE, number, "function"]
        if isinstance(value, type) and issubclass(value, Exception):
            bases = [kind.__name__ for kind in value.__mro__ if getattr(builtins, kind.__name__, None) is kind]
            return [MINE, number, "exception", value.__name__[:MAX_NAME_CHARACTERS], bases[0]]
        kind = value if isinstance(value, type) else type(value)
        return [MINE, number, "object", str(kind.__name__)[:MAX_NAME_CHARACTERS]]

    def _resolve(self, payload: Payload) -> Any:
        tag, number, kind, *names = payload
        if tag == YOURS:
            return self._objects[number] if isinstance(number, int) else self._find(number) if self._find else None
        if number not in self._references:
            self._references[number] = self._reference(number, kind, names)
        return self._references[number]

    def _reference(self, number: int, kind: str, names: list[str]) -> Any:
        """The object at this end for a reference of the other."""
        if kind == "object" and names:
            name = names[0]
            if name not in self._classes:  # so that type(x).__name__ is the program's
                base = RemoteObject if self.allows_objects else UnnamedObject
                self._classes[name] = type(name, (base,), {})
            return self._classes[name](self, number)
        if kind == "exception" and len(names) == 2:
            return self.exception_class(*names)
        return (RemoteCoroutineFunction if kind == "async" else RemoteFunction)(self, number)

    def exception_class(self, name: str, base: str = "Exception") -> type[Exception]:
        """The class that stands at this end for an exception of the program."""
        if name not in self.exceptions:
            kind = getattr(builtins, base, None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = Exception
            self.exceptions[name] = cast("type[Exception]", type(name, (kind,), {}))
        return self.exceptions[name]

    def _rebuilt(self, reply: frames.Frame) -> BaseException:
        """An exception of a class that this end knows, as near to the raised one as possible."""
        names, text = reply["names"], reply["text"]
        if any(name in _ENDS_ITERATION for name in names):
            return RuntimeError(f"{names[0]}: {text}")
        for name in names:
            kind = self.exceptions.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                with Caught():
                    return kind(text)
                return RuntimeError(f"{names[0]}: {text}")
        return CallStopped("exited", f"{names[0] if names else 'an exception'}: {text}")


def _replace_content(local: Any, new: Any) -> None:
    match local:
        case list() | bytearray():
            local[:] = new
        case deque():
            local.clear()
            local.extend(new)
        case dict() | set():
            local.clear()
            local.update(new)
