"""The process in which math-verify compares two answers, and the call that asks it.

math-verify's own time limit is a signal of the main thread, and cannot stop one long operation on a huge integer.
Here the kernel ends the whole process when a pair has used up its processor time; the next call starts another.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading

CPU_SECONDS = 1.0

_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None


@functools.lru_cache(maxsize=4096)  # a group repeats its answers, and a fatal pair is tried once
def same_value(gold: str, found: str, *, free: bool = False) -> bool:
    """Say whether math-verify takes two answers to be equal, False where it cannot tell in time.

    Args:
        gold: the reference answer, as LaTeX or plain text.
        found: the answer to be graded, or, with `free`, a text that contains it.
        free: search `found` for the answer.

    Returns:
        Whether they are equal.

    Raises:
        RuntimeError: the process does not start; its own message is on stderr.

    Example:
        >>> same_value("1/2", "\\\\frac{1}{2}")
        True
    """
    with _lock:
        try:
            process = _running()
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([gold, found, free]) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        except BaseException:  # an interrupt in here would leave a reply behind for the next pair
            _stop()
            raise
        if not reply:
            _stop()
        return reply == "1\n"


def _running() -> subprocess.Popen[str]:
    global _process
    if _process is None or _process.poll() is not None:
        _stop()
        _process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "trimtab.graders.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
        assert _process.stdout
        if _process.stdout.readline() != "ready\n":
            raise RuntimeError("the grading process did not start (see its message on stderr)")
    return _process


@atexit.register
def _stop() -> None:
    global _process
    process, _process = _process, None
    if process is not None:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
            pass


def _forget() -> None:
    # A forked child must not talk over its parent's pipes.
    global _lock, _process
    _lock, _process = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def _serve() -> None:
    """Answer one JSON line [gold, found, free] after the other with 1 or 0."""
    replies, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _compare("1/2", "the answer is $0.5$", free=True)  # loads what the first pair would otherwise pay for
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        gold, found, free = json.loads(line)
        equal = _compare(gold, found, free=free)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(equal), file=replies, flush=True)


def _compare(gold: str, found: str, *, free: bool) -> bool:
    from math_verify import parse, verify

    # math-verify prefers an early "Answer: 5" to a later "the answer is 7", so it is shown the last mention first.
    texts = [re.sub(r"(?is)^.*(?=answer)", "", found), found] if free else [f"\\boxed{{{found}}}"]
    expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    parsed: list[object] = next((values for text in texts if (values := parse(text, parsing_timeout=None))), [])
    return bool(verify(expected, parsed, timeout_seconds=None))


if __name__ == "__main__":
    _serve()
