"""Prefixes, progress bars and noise, byte for byte."""

from __future__ import annotations

import io

import pytest

from tfdist.launch.output import FileCopy, LiveLines, Memory, Screen, WholeLines, is_noise

ONEDNN = (
    b"I0000 00:00:1795983609.536603    9855 port.cc:153] oneDNN custom operations are on. You may see "
    b"slightly different numerical results due to floating-point round-off errors."
)
NOTICE = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"


class Shown:
    """A screen that remembers, with one live and one whole-line stream."""

    def __init__(self, *, terminal: bool = False, quiet: bool = True) -> None:
        self.data = b""
        screen = Screen(self._add, is_terminal=terminal)
        self.first = LiveLines(screen, b"[0] ", quiet=quiet, hold_text=not terminal)
        self.second = WholeLines(screen, b"[1] ", quiet=quiet)

    def _add(self, data: bytes) -> None:
        self.data += data


def bar(step: int, before: int) -> bytes:
    """What keras.utils.Progbar writes: backspaces over the last state, a return, the new state."""
    return b"\b" * before + b"\r" + f"{step}/3 ━━━ loss: 0.{step}".encode()


@pytest.mark.parametrize("terminal", [False, True])
def test_keras_bar_of_rank_0_passes_through_untouched(terminal: bool) -> None:
    shown = Shown(terminal=terminal)
    states = [bar(1, 0), bar(2, 14), bar(3, 14) + b"\n"]
    shown.first.feed(b"Epoch 1/1\n")
    for count, state in enumerate(states, 1):
        shown.first.feed(state)
        assert shown.data == b"[0] Epoch 1/1\n" + b"".join(states[:count])  # live, not at the line's end


def test_other_ranks_show_a_bar_in_its_last_state() -> None:
    shown = Shown()
    for state in (b"Epoch 1/1\n", bar(1, 0), bar(2, 14), bar(3, 14)):
        shown.second.feed(state)
    assert shown.data == b"[1] Epoch 1/1\n"
    shown.second.feed(b"\n")
    assert shown.data == "[1] Epoch 1/1\n[1] 3/3 ━━━ loss: 0.3\n".encode()


def test_line_of_another_rank_takes_the_place_of_the_bar_on_a_terminal() -> None:
    shown = Shown(terminal=True)
    shown.first.feed(b"\r1/3 --")
    shown.second.feed(b"hello\n")
    assert shown.data == b"\r1/3 --" + b"\r\x1b[K[1] hello\n" + b"1/3 --"


def test_line_of_another_rank_breaks_the_line_where_nothing_can_be_erased() -> None:
    shown = Shown()
    shown.first.feed(b"\r1/3 --")
    shown.second.feed(b"hello\n")
    shown.first.feed(b"\b\b\r2/3 --\n")
    assert shown.data == b"\r1/3 --\n[1] hello\n\b\b\r2/3 --\n"


def test_text_lines_of_two_ranks_never_mix_off_a_terminal() -> None:
    shown = Shown()
    shown.first.feed(b"one ")
    shown.second.feed(b"two\n")
    shown.first.feed(b"line\n")
    assert shown.data == b"[1] two\n[0] one line\n"


def test_a_question_is_seen_on_a_terminal_before_its_line_ends() -> None:
    shown = Shown(terminal=True)
    shown.first.feed(b"name? ")
    assert shown.data == b"[0] name? "


def test_redrawn_text_keeps_its_prefix_and_line_ends_stay() -> None:
    shown = Shown(terminal=True)
    for part in (b"load 10%", b"\rload 20%", b"\r", b"load 30%\r\n", b"next\r", b"\n"):
        shown.first.feed(part)
    assert shown.data == b"[0] load 10%\r[0] load 20%\r[0] load 30%\r\n[0] next\r\n"


def test_byte_by_byte_gives_the_same() -> None:
    text = b"Epoch 1\n" + bar(1, 0) + bar(2, 14) + b"\nline\r\n\r\nlast"
    whole, single = Shown(), Shown()
    whole.first.feed(text)
    for index in range(len(text)):
        single.first.feed(text[index : index + 1])
    whole.first.close()
    single.first.close()
    assert whole.data == single.data
    assert whole.data.endswith(b"[0] line\r\n[0] \r\n[0] last\n")


@pytest.mark.parametrize(
    "line",
    [
        ONEDNN,
        NOTICE,
        b"2024-05-01 10:11:12.345678: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.",
        b"E0000 00:00:1747.5 12 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register "
        b"factory for plugin cuDNN when one has already been registered",
        b"2024-05-01 10:11:12.345678: E external/local_xla/xla/stream_executor/cuda/cuda_blas.cc:1515] "
        b"Unable to register cuBLAS factory: Attempting to register factory for plugin cuBLAS when",
        b"W0000 00:00:1747.5 12 computation_placer.cc:177] computation placer already registered. Please",
        b"E0000 00:00:1747.5 12 cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA error: Failed "
        b"call to cuInit: UNKNOWN ERROR (303)",
        b"E0000 00:00:1795986192.356333    6428 base_collective_executor.cc:252] "
        b"BaseCollectiveExecutor::StartAbort UNAVAILABLE: Rank 1 (host vm, pid 6064) ended early: ValueError",
        b"E0000 00:00:1795986192.356436    6428 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: "
        b"Collective ops is aborted by: Rank 1 (host vm, pid 6064) ended early: ValueError",
        b"Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling "
        b"/tensorflow.WorkerService/RecvBuf:",
        b':UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}',
        b"The error could be from a previous operation. Restart your program to reset. [type.googleapis.com/"
        b"tensorflow.DerivedStatus='']",
    ],
)
def test_messages_that_nobody_needs_are_noise(line: bytes) -> None:
    assert is_noise(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"I0000 is my experiment",
        b"Info: starting",
        b"E0000 00:00:1747.5 12 cuda_driver.cc:1] failed call to cuInit: CUDA_ERROR_UNKNOWN: unknown error",
        b"W0000 00:00:1747.5 12 gpu_device.cc:2342] Cannot dlopen some GPU libraries.",
        b"2024-05-01 10:11:12.345678: E tensorflow/core/x.cc:1] oneDNN failed",
        b"2024-05-01 10:11:12.345678: W tensorflow/core/framework/op_kernel.cc:1] OOM when allocating tensor",
        b"E0000 00:00:1747.5 12 collective.cc:1] Something else about a collective",
        b"F0000 00:00:1747.5 12 tensor.cc:1] Check failed: dtype() == expected",
        b"INFO:tensorflow:my own summary",
        b"WARNING: All log messages are mine",
    ],
)
def test_user_lines_and_errors_are_not_noise(line: bytes) -> None:
    assert not is_noise(line)


@pytest.mark.parametrize("name", ["first", "second"])
def test_noise_disappears_even_in_pieces_and_only_when_quiet(name: str) -> None:
    text = NOTICE + b"\n" + ONEDNN + b"\nhello\n"
    for quiet, expected in ((True, 1), (False, 3)):
        shown = Shown(terminal=True, quiet=quiet)
        for start in range(0, len(text), 40):
            getattr(shown, name).feed(text[start : start + 40])
        assert shown.data.count(b"\n") == expected
        assert shown.data.endswith(b"] hello\n")


def test_file_gets_everything_but_noise() -> None:
    file = io.BytesIO()
    copy = FileCopy(file, quiet=True)
    for part in (b"Epoch\n", bar(1, 0), ONEDNN[:30], ONEDNN[30:], b"\n", NOTICE + b"\nend"):
        copy.feed(part)
    copy.close()
    assert file.getvalue() == b"Epoch\n" + bar(1, 0) + b"end"


def test_memory_finds_the_last_traceback_with_what_it_was_chained_to() -> None:
    memory = Memory()
    handled = b"Traceback (most recent call last):\n  File a\nOSError: handled\nepoch 1\n"
    chain = (
        b"Traceback (most recent call last):\n  File b\nKeyError: 1\n\n"
        b"During handling of the above exception, another exception occurred:\n\n"
        b"Traceback (most recent call last):\n  File c\nValueError: boom\n"
    )
    memory.feed(handled + chain[:70])
    memory.feed(chain[70:])
    assert b"\n".join(memory.last_words(quiet=True)) + b"\n" == chain
    assert memory.traceback_at is not None
    assert not memory.is_consequence()


def test_memory_without_a_traceback_keeps_the_last_lines() -> None:
    memory = Memory()
    memory.feed(b"".join(b"%d\n" % number for number in range(50)) + b"Segmentation fault")
    words = memory.last_words(quiet=True)
    assert words[-1] == b"Segmentation fault"
    assert len(words) == 10
    assert memory.traceback_at is None


def test_memory_knows_errors_that_another_rank_caused() -> None:
    memory = Memory()
    memory.feed(
        b"Traceback (most recent call last):\n  File a\ntfdist.errors.PeerLostError: rank 1 is gone\n"
    )
    assert memory.is_consequence()
