"""Signals: the first ends a command and cleans up, further ones do not break that, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from commandline import base_environment

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def start(code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=base_environment(),
        preexec_fn=restore,
    )
    assert child.stderr is not None
    assert child.stderr.readline() == "ready\n"
    return child


def restore() -> None:
    """Whoever runs the tests may ignore signals, and children inherit that."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


COMMAND = """
    import subprocess, sys, time
    from compress.cli.boundary import run_guarded
    from compress.cli.terminal import Terminal
    def say(word):
        print(word, file=sys.stderr, flush=True)
    def command():
        try:
            say("ready")
            time.sleep(60)
        finally:
            say("cleaning")
            time.sleep(1)
            handlers = "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
            say(subprocess.run([sys.executable, "-c", handlers], capture_output=True, text=True).stdout.strip())
            say("cleaned up")
    code = run_guarded(Terminal(), command)
    say("leaving")
    time.sleep(1)
    sys.exit(code)
"""


@pytest.mark.parametrize("first", ENDING)
def test_further_signals_do_not_break_the_clean_up(first: signal.Signals) -> None:
    child = start(COMMAND)
    assert child.stderr is not None
    child.send_signal(first)
    seen = [child.stderr.readline()]
    for number in ENDING:
        child.send_signal(number)
    while seen[-1] not in ("", "leaving\n"):
        seen.append(child.stderr.readline())
    for number in ENDING:
        child.send_signal(number)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 130, rest
    # True: what the clean-up starts can be ended by SIGTERM.
    assert seen == ["cleaning\n", "True\n", "cleaned up\n", "error: interrupted\n", "leaving\n"]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_during_a_destructor_is_not_lost(number: signal.Signals) -> None:
    """Python drops what is raised there."""
    child = start("""
        import sys, time
        from compress.cli.boundary import run_guarded
        from compress.cli.terminal import Terminal
        class Slow:
            def __del__(self):
                print("ready", file=sys.stderr, flush=True)
                time.sleep(2)
        def command():
            slow = Slow()
            del slow
            time.sleep(60)
        sys.exit(run_guarded(Terminal(), command))
    """)
    child.send_signal(number)
    _, rest = child.communicate(timeout=30)
    assert child.returncode == 130, rest
    assert rest == "error: interrupted\n"


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    child = start("""
        import signal, sys, time
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from compress.cli.boundary import Done, run_guarded
        from compress.cli.terminal import Terminal
        def command():
            print("ready", file=sys.stderr, flush=True)
            time.sleep(1)
            return Done(exit_code=3)
        sys.exit(run_guarded(Terminal(), command))
    """)
    child.send_signal(signal.SIGHUP)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 3, rest


def alive(process: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(process)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has ended")
def test_a_busy_child_dies_with_its_killed_parent() -> None:
    parent = start("""
        import os, subprocess, sys, time
        code = (
            "import os, sys, time; from compress.orphans import die_with_parent\\n"
            "die_with_parent(int(sys.argv[1])); print('up', flush=True); time.sleep(600)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE, start_new_session=True
        )
        child.stdout.readline()
        print(child.pid, flush=True)
        print("ready", file=sys.stderr, flush=True)
        time.sleep(600)
    """)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate(timeout=60)
    assert gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has ended")
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from compress.orphans import die_with_parent; die_with_parent(1 << 22); print('still here')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
