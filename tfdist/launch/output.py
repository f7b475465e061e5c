r"""What the ranks print, on one screen or in one file per rank.

Lines of several ranks must not run into each other, and a progress bar must stay one. A bar is a line that
is redrawn: Keras prints `\b\b…\r 3/20 ━━…` again and again and `\n` only at the end of the epoch, on a
terminal as on a pipe. So rank 0 is shown live, and those of its lines that start with a carriage return or
backspaces are passed through untouched; the other ranks are shown by whole lines, of a redrawn line only the
last state. When such a line arrives while rank 0's bar is half drawn, it takes the bar's place and the bar is
drawn anew below it.
"""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Callable
from typing import IO, Protocol

_LIVE_LIMIT = 1 << 16  # bytes of an unfinished line to keep; longer ones are shown in parts

# C++ log lines start like this: absl's format, the older TensorFlow format, and absl's notice.
_LOG_START = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] |WARNING: All log messages"
)
# What TensorFlow says at every start whatever TF_CPP_MIN_LOG_LEVEL is (seen on 2.21, where levels 1 to 3
# make no difference to absl's notice and to oneDNN's line): information, CUDA libraries registered twice
# inside its own binary, and machines that have no CUDA driver at all. Then what an aborted collective logs,
# on several lines, once or twice per rank: it repeats the rank's exception, and advises a "reset" that does
# not help here.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|(I\d{4} [\d:.]+ +\d+|[\d-]+ [\d:.]+: I) \S+\.(cc|cpp|cu|h):\d+\] "
    rb"|([EW]\d{4} [\d:.]+ +\d+|[\d-]+ [\d:.]+: [EW]) \S+\.cc:\d+\] "
    rb"(Unable to register cu\w+ factory: Attempting to register factory"
    rb"|computation[ _]placer already registered"
    rb"|failed call to cuInit: .*UNKNOWN ERROR \(303\)"
    rb"|BaseCollectiveExecutor::StartAbort |Aborting \w+ with )"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags"
    rb"|Additional GRPC error information from remote target /job:"
    rb"|:UNKNOWN:Error received from peer +\{grpc_message:"
    rb"|The error could be from a previous operation\. Restart your program to reset\."
)
_TRACEBACK = re.compile(rb"(  \+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
# Errors that say "another rank is gone", or failed: never the first cause when another rank failed as well.
_CONSEQUENCE = re.compile(rb"^\S*(PeerLostError|PeerFailedError|HorovodInternalError)\b")


def is_noise(line: bytes) -> bool:
    """Whether a line is one of TensorFlow's messages that no variable silences and nobody needs."""
    return _NOISE.match(line) is not None


class Screen:
    """One destination shared by all ranks; knows whether rank 0's current line is unfinished.

    Args:
        write: takes bytes; blocks until they are written.
        is_terminal: whether lines can be erased.
    """

    def __init__(self, write: Callable[[bytes], object], *, is_terminal: bool) -> None:
        self._write = write
        self._is_terminal = is_terminal
        self._open = bytearray()

    def write_line(self, line: bytes) -> None:
        """Shows a whole line (without its newline) above rank 0's unfinished one."""
        if not self._open:
            self._write(line + b"\n")
        elif self._is_terminal:
            drawn = bytes(self._open).rpartition(b"\r")[2]
            self._write(b"\r\x1b[K" + line + b"\n" + drawn)
        else:
            self._write(b"\n" + line + b"\n")
            self._open.clear()

    def write_live(self, data: bytes) -> None:
        """Shows bytes of rank 0 as they are."""
        self._write(data)
        self._open += data
        if (end := self._open.rfind(b"\n")) >= 0:
            del self._open[: end + 1]
        if len(self._open) > _LIVE_LIMIT:
            del self._open[: self._open.rfind(b"\r") + 1 or len(self._open) - 1]


class Channel(Protocol):
    """One stream of one rank on its way to a screen or file."""

    def feed(self, data: bytes) -> None:
        """Takes what arrived."""

    def close(self) -> None:
        """Shows what is left."""


class WholeLines:
    """A stream shown by whole lines, each with a prefix; redrawn lines appear in their last state."""

    def __init__(self, screen: Screen, prefix: bytes, *, quiet: bool) -> None:
        self._screen = screen
        self._prefix = prefix
        self._quiet = quiet
        self._pending = b""

    def feed(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self._pending) > _LIVE_LIMIT:
            if b"\r" in self._pending:
                self._pending = self._pending[self._pending.rindex(b"\r") :]
            else:
                self.close()

    def close(self) -> None:
        if self._pending:
            self._show(self._pending)
            self._pending = b""

    def _show(self, line: bytes) -> None:
        states = [state for part in line.split(b"\r") if (state := part.replace(b"\b", b""))]
        text = states[-1] if states else b""
        if not (self._quiet and is_noise(text)):
            self._screen.write_line(self._prefix + text)


class LiveLines:
    """A stream shown as it arrives: text with a prefix at each line's start, redrawn lines untouched.

    Args:
        screen: where to show it.
        prefix: what to put before each line of text.
        quiet: leaves out TensorFlow's start-up messages.
        hold_text: shows text only once its line is complete or turns out to be redrawn, so that lines of
            other ranks cannot split it; False on a terminal, where a question must be seen before its answer.
    """

    def __init__(self, screen: Screen, prefix: bytes, *, quiet: bool, hold_text: bool) -> None:
        self._screen = screen
        self._prefix = prefix
        self._quiet = quiet
        self._hold_text = hold_text
        self._pending = b""
        self._inside: str = ""  # "text" or "bar" once part of the current line is shown
        self._after_return = False

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._pending + data).split(b"\n")
        shown = b"".join([self._piece(line, b"\n") for line in lines])
        self._pending = b""
        if rest and not self._inside and self._must_wait(rest):
            self._pending = rest
        elif rest:
            shown += self._piece(rest, b"")
        if shown:
            self._screen.write_live(shown)

    def close(self) -> None:
        if self._pending:
            self._screen.write_line(self._prefix + self._pending)
            self._pending = b""
        elif self._inside == "text" and self._hold_text:
            self._screen.write_live(b"\n")

    def _piece(self, line: bytes, newline: bytes) -> bytes:
        """What to show of a line, or of its next part when `newline` is empty."""
        start = b""
        if not self._inside:
            if self._quiet and newline and is_noise(line):
                return b""
            is_bar = line[:1] in (b"\r", b"\b") and line != b"\r"  # not the first half of `\r\n`
            self._inside = "bar" if is_bar else "text"
            start = b"" if is_bar else self._prefix
        text = line + newline
        shown = start + (self._redraw_prefixed(text) if self._inside == "text" else text)
        if newline:
            self._inside, self._after_return = "", False
        return shown

    def _must_wait(self, line: bytes) -> bool:
        if len(line) > _LIVE_LIMIT or line[:1] in (b"\r", b"\b"):
            return line == b"\r"  # a bar, or the first half of `\r\n`
        if self._quiet and _LOG_START.match(line):
            return True
        return self._hold_text and b"\r" not in line and b"\b" not in line

    def _redraw_prefixed(self, text: bytes) -> bytes:
        """Repeats the prefix after each carriage return that is not part of a line's end."""
        if not self._prefix:
            return text
        start = self._prefix if self._after_return and text[:1] not in (b"\r", b"\n") else b""
        self._after_return = text.endswith(b"\r")
        return start + re.sub(rb"\r(?=[^\r\n])", lambda _: b"\r" + self._prefix, text)


class FileCopy:
    """A stream written to a file, unchanged but for TensorFlow's start-up messages."""

    def __init__(self, file: IO[bytes], *, quiet: bool) -> None:
        self._file = file
        self._quiet = quiet
        self._pending = b""

    def feed(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        shown = [line + b"\n" for line in lines if not (self._quiet and is_noise(line))]
        if not (self._quiet and _LOG_START.match(self._pending)):
            shown.append(self._pending)
            self._pending = b""
        self._file.write(b"".join(shown))
        self._file.flush()

    def close(self) -> None:
        self._file.write(self._pending)
        self._file.flush()
        self._pending = b""


class Memory:
    """The last lines that a rank wrote, to tell why it failed, and when it began to say so."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=1000)
        self._pending = b""
        self.traceback_at: float | None = None

    def feed(self, data: bytes) -> None:
        """Takes what arrived."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._pending = self._pending[-_LIVE_LIMIT:]
        for line in lines:
            if _TRACEBACK.match(line):
                self.traceback_at = time.monotonic()
            self._lines.append(line.rpartition(b"\r")[2] if not line.endswith(b"\r") else line[:-1])

    def last_words(self, *, quiet: bool) -> list[bytes]:
        """The last traceback with the exceptions it was chained to; without one, the last few lines."""
        lines = [*self._lines, *([self._pending] if self._pending else [])]
        lines = [line for line in lines if not (quiet and is_noise(line))]
        headers = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
        if not headers:
            return lines[-10:]
        start = headers.pop()
        while headers and any(line.startswith(_CHAINED) for line in lines[max(0, start - 2) : start]):
            start = headers.pop()
        return lines[start:]

    def is_consequence(self) -> bool:
        """Whether the rank's last error says that another rank was lost."""
        return any(_CONSEQUENCE.match(line) for line in [*self._lines, self._pending][-10:])


def write_fully(descriptor: int) -> Callable[[bytes], None]:
    """A `write` for `Screen` that does not return before the last byte is out."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write
