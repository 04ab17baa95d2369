from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap

import pytest

from compress.cli import terminal as terminal_module
from compress.cli.terminal import Terminal, duration, plain_advance
from compress.progress import Progress


class Live(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)


def test_results_go_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.result("a result [not markup]")
    terminal.say("a word")
    terminal.fail("it broke", hint="mend it")
    captured = capsys.readouterr()
    assert captured.out == "a result [not markup]\n"
    assert captured.err == "a word\nerror: it broke\nhint: mend it\n"


def test_quiet_keeps_results_and_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    terminal: Terminal = Terminal(quiet=True)
    with terminal.phase("calibrating", 2) as advance:
        advance(2)
    terminal.say("a word")
    terminal.result("a result")
    terminal.fail("it broke")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert captured.err == "error: it broke\n"


def test_json_leaves_stdout_to_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(json=True)
    terminal.result("a table")
    terminal.emit({"exit_code": 0})
    assert capsys.readouterr().out == '{\n  "exit_code": 0\n}\n'


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Terminal(json=True).emit({"value": float("nan")})


def test_long_messages_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    message = "recipe.yaml:3:5: steps: " + "word " * 60
    Terminal().fail(message)
    assert capsys.readouterr().err == f"error: {message}\n"


def test_traceback_only_when_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError("deep inside")
    Terminal().fail("it broke", error=error)
    assert "ValueError" not in capsys.readouterr().err
    Terminal(verbose=True).fail("it broke", error=error)
    assert "ValueError: deep inside" in capsys.readouterr().err


def test_plain_phase_says_that_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    terminal: Progress = Terminal()
    with terminal.phase("quantizing layers", 210) as advance:
        advance(210)
    captured = capsys.readouterr()
    assert captured.err == "quantizing layers ...\n"
    assert captured.out == ""


def test_plain_lines_are_rare_and_tell_the_time_left() -> None:
    lines: list[str] = []
    now = 0.0
    advance = plain_advance("evaluating", 100, lines.append, lambda: now)
    for _ in range(100):
        now += 1
        advance(1)
    assert lines[0] == "evaluating: 10%, about 1 min 30 s left"
    assert lines[-1] == "evaluating: 100%, about 0 s left"
    assert len(lines) == 10
    now += 1000
    advance(50)
    assert len(lines) == 10


def test_plain_lines_come_after_a_minute_even_without_a_tenth() -> None:
    lines: list[str] = []
    now = 0.0
    advance = plain_advance("evaluating", 1000, lines.append, lambda: now)
    for _ in range(3):
        now += 30
        advance(1)
    assert lines == ["evaluating: 0%, about 8 h 19 min left"]


def test_short_live_phases_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Live()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal().phase("loading", 1) as advance:
        advance(1)
    assert "loading" not in stream.getvalue()


def test_long_live_phases_show_a_bar_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Live()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(terminal_module, "SHORT_SECONDS", 0.0)
    terminal = Terminal()
    with terminal.phase("outer", 1), terminal.phase("inner", 4) as advance:
        for _ in range(4):
            advance(1)
        threading_pause()
    shown = stream.getvalue()
    assert "outer: done in" in shown
    assert "inner: done in" in shown
    assert "left" in shown


def threading_pause() -> None:
    """Long enough for the bars' own thread to draw once (it draws ten times a second)."""
    import time

    time.sleep(0.4)


def test_the_library_s_prints_go_to_stderr_while_stdout_is_reserved() -> None:
    done = run_python("""
        import subprocess, sys
        from compress.cli.terminal import Terminal
        terminal = Terminal()
        with terminal.reserved_stdout():
            print("from a library")
            subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
            terminal.result("the result")
        print("afterwards")
    """)
    assert done.stdout.decode() == "the result\nafterwards\n"
    assert b"from a library" in done.stderr
    assert b"from a child" in done.stderr


def test_a_reader_that_leaves_does_not_end_the_command() -> None:
    code = textwrap.dedent("""
        import sys
        from compress.cli.boundary import Done, run_guarded
        from compress.cli.terminal import Terminal
        terminal = Terminal()
        def command():
            for _ in range(20000):
                terminal.result("a line of the result")
            return Done(exit_code=3)
        sys.exit(run_guarded(terminal, command))
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 3
    assert errors == b""


def test_an_encoding_without_the_characters_shows_escapes() -> None:
    done = run_python(
        "from compress.cli.terminal import Terminal; Terminal().result('Ünïcode \\u2713')",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0
    assert done.stdout == b"\\xdcn\\xefcode \\u2713\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (5000, "1 h 23 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
