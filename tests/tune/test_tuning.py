"""The loop of `gdp tune`: its order, its end, commands that fail in any way, and runs that were killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from gdp.cluster.detect.machine import among_visible
from gdp.errors import InputError
from gdp.tune.measuring import CANDIDATE, FAILED, NO_TIME, OK, OUT_OF_MEMORY, TIMED_OUT, Measured, Measuring
from gdp.tune.tuning import LOG, LoggedCandidate, LoggedMeasurement, Tuning, alone

QUESTION = {"model": "net", "devices": "local", "options": {}}


def candidates(*predicted_ns: int, first: int = 0) -> list[LoggedCandidate]:
    return [
        LoggedCandidate(f"plan {number}", time_ns, 0.15, number < first, [float(number)])
        for number, time_ns in enumerate(predicted_ns)
    ]


def run(tuning: Tuning, times_ns: dict[int, float], most: int = 50) -> list[int]:
    """Runs with these times; infinite ones fail. Returns the candidates in the order of their measurements."""

    def measure(directory: Path) -> Measured:
        time_ns = times_ns[int(directory.name)]
        return Measured(OK, time_ns, 0.01) if time_ns < inf else Measured(FAILED)

    tuning.run(measure, most=most, ends_s=inf, on_measured=lambda _: None)
    return [line.candidate for line in tuning.measurements]


def test_order_and_answer(tmp_path: Path) -> None:
    """The first ones come first, then the fastest prediction; it ends when no other is likely to be faster, and the
    answer is the fastest measured one, whatever was predicted."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(300, 250, 100, 110, 900, first=2))
    assert run(tuning, {0: 300, 1: 250, 2: 240, 3: 200, 4: 900}) == [0, 1, 2, 3]
    assert tuning.answer == 3
    assert tuning.ended.startswith("no other is likely to be faster")


def test_leaders_are_measured_again(tmp_path: Path) -> None:
    """Two plans within the noise take turns before one is the answer: the first time of the first was a lucky one. Its
    times are 100, 110, 110, those of the other 102: it leads, then the median of two is 105, and of three 110."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 102, 300, first=2))
    times_ns = {0: [100.0, 110.0, 110.0], 1: [102.0] * 3}
    tuning.run(
        lambda directory: Measured(OK, times_ns[int(directory.name)].pop(0), 0.01),
        most=50,
        ends_s=inf,
        on_measured=lambda _: None,
    )
    assert [line.candidate for line in tuning.measurements] == [0, 1, 0, 1, 1, 0]
    assert tuning.answer == 1


def test_a_machine_that_slows_down_is_noticed(tmp_path: Path) -> None:
    """By hand: the first plan takes 100, then the machine takes twice as long, and the others 180 and 300 in place of
    90 and 150. The first, measured again at the end, takes 200: so the next ones are measured again too, and the second
    is the answer, of 180 to the median of 100, 200 and 200."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 100, 100, first=3))
    times_ns = {0: [100.0, 200.0, 200.0], 1: [180.0] * 3, 2: [300.0] * 3}
    tuning.run(
        lambda directory: Measured(OK, times_ns[int(directory.name)].pop(0), 0.01),
        most=50,
        ends_s=inf,
        on_measured=lambda _: None,
    )
    assert [line.candidate for line in tuning.measurements][:4] == [0, 1, 2, 0]
    assert tuning.answer == 1
    assert "2.00 times as long" in tuning.ended


def test_a_failed_plan_is_measured_too(tmp_path: Path) -> None:
    """A plan that does not run is not the answer and does not come again; where none runs there is no answer."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 105))
    assert run(tuning, {0: inf, 1: 130}) == [0, 1]
    assert tuning.answer == 1
    broken = Tuning.begin(tmp_path / "b", QUESTION, candidates(*range(100, 107)))
    assert run(broken, dict.fromkeys(range(7), inf)) == [0, 1, 2, 3, 4]  # that fail alike
    assert broken.answer is None


def test_one_failure_of_several_is_not_the_end_of_a_plan(tmp_path: Path) -> None:
    """A plan that ran once and failed once, such as on a busy machine, is measured a third time, which decides."""
    for last, answer in ((100.0, 0), (inf, None)):
        tuning = Tuning.begin(tmp_path / str(answer), QUESTION, candidates(100, first=1))
        times_ns = [100.0, inf, last]
        line = LoggedMeasurement(0, 100, 100, OK, 100, 0.01, "", 1.0)
        for time_ns in times_ns:
            is_ok = time_ns < inf
            tuning.measurements.append(
                replace(line, status=OK if is_ok else FAILED, step_ns=round(time_ns) if is_ok else None)
            )
        assert tuning.measured_ns == {0: 100.0 if answer == 0 else inf}
        assert tuning.answer == answer
        tuning.measurements.pop()
        assert tuning.answer == 0


def test_noise_hides_which_is_the_fastest(tmp_path: Path) -> None:
    """By hand: errors of predictions deviate by 15 %, those of measurements by 10 %. The second plan, predicted to take
    twice as long, was measured 1 % faster than the first: as likely as not by luck, so the first is the answer."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 200, first=2))
    tuning.run(
        lambda directory: Measured(OK, {"0": 100e3, "1": 99e3}[directory.name], 0.1),
        most=2,
        ends_s=inf,
        on_measured=lambda _: None,
    )
    assert tuning.answer == 0


def test_time_is_up(tmp_path: Path) -> None:
    """No measurement begins after the end, and the answer is the fastest so far."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 90, first=2))
    ends_s = time.monotonic() + 0.2

    def measure(_: Path) -> Measured:
        time.sleep(0.3)
        return Measured(OK, 100.0, 0.01)

    tuning.run(measure, most=50, ends_s=ends_s, on_measured=lambda _: None)
    assert (tuning.ended, tuning.answer, len(tuning.measurements)) == ("time is up", 0, 1)


def test_what_took_too_long_may_take_longer(tmp_path: Path) -> None:
    """A plan that did not end in time is measured again by a run with a longer timeout, and by no other."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 90, first=1))
    tuning.run(lambda _: Measured(TIMED_OUT), most=1, ends_s=inf, on_measured=lambda _: None)
    seconds = tuning.measurements[0].seconds
    for timeout_s, count in ((seconds, 1), (seconds + 1, 0)):
        assert len(Tuning.resume(tmp_path, QUESTION, timeout_s).measurements) == count


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second run in a directory is refused while one measures there."""
    refused = pytest.raises(InputError, match="another gdp tune measures there")
    with alone(tmp_path / "new"), refused, alone(tmp_path / "new"):
        pass
    with alone(tmp_path / "new"):
        pass


def test_cards_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards are numbered among those that the user lets gdp see; too few are left to the command to complain about."""
    for here, chosen, given in (("4,5", "1,0", "5,4"), ("4", "0,1", "0,1"), ("GPU-a, GPU-b", "1", "GPU-b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
        assert among_visible({"CUDA_VISIBLE_DEVICES": chosen, "A": "b"}) == {"CUDA_VISIBLE_DEVICES": given, "A": "b"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert among_visible({"CUDA_VISIBLE_DEVICES": "0,1"}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert among_visible({}) == {}


def test_a_command_may_end_what_it_has_elsewhere(tmp_path: Path) -> None:
    """A command that takes too long gets SIGTERM first, such as to end a container; SIGKILL follows."""
    for last in "exit", "sleep 60 & wait":
        command = f"trap 'echo ended >> {tmp_path}/told; {last}' TERM; sleep 60 & wait"
        assert Measuring.by_command(command, None, 0.5).measure(tmp_path).status == TIMED_OUT
    assert (tmp_path / "told").read_text() == "ended\n" * 2


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    """A plan whose directory was removed is one that failed, and others are measured."""
    found = Measuring.by_command("true", None, 20.0).measure(tmp_path / "0")
    assert (found.status, found.reason) == (FAILED, f"{tmp_path / '0'}: No such file or directory")


def test_predictions_before_and_after(tmp_path: Path) -> None:
    """After a step of twice the time predicted, the next is expected to take longer than predicted, too."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 105, first=2))
    run(tuning, {0: 200, 1: 210})
    first, second, *_ = tuning.measurements
    assert first.before_ns == 100
    assert 190 <= first.after_ns <= 200
    assert 180 <= second.before_ns <= 210


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("echo '{\"step_time_ms\": 9}'; echo noise; echo '{\"step_time_ms\": 2.5}'", OK),
        ("exit 7", FAILED),
        ("kill -9 $$", FAILED),
        ("echo RuntimeError: CUDA out of memory >&2; exit 1", OUT_OF_MEMORY),
        ("sleep 60 & sleep 60", TIMED_OUT),
        ("true", NO_TIME),
        ('echo \'{"step_time_ms": "fast"}\'', NO_TIME),
        ("echo '{\"step_time_ms\": -1}'", NO_TIME),
        ("echo '{\"step_time_ms\": NaN}'", NO_TIME),
        (f"echo '{{\"step_time_ms\": {'9' * 400}}}'", NO_TIME),
        ("yes '{\"a\":' | head -n 9999 | tr -d '\\n'", NO_TIME),
        ("head -c 3000000 /dev/urandom", NO_TIME),
    ],
)
def test_commands(tmp_path: Path, command: str, status: str) -> None:
    """Whatever a command does is a measurement: a time, or the reason why there is none."""
    found = Measuring.by_command(command, None, timeout_s=1.0 if status == TIMED_OUT else 20.0).measure(tmp_path)
    assert found.status == status
    assert found.step_ns == (2.5e6 if status == OK else inf)
    assert found.reason or status == OK


def test_the_first_error_is_the_reason(tmp_path: Path) -> None:
    """Of an output that ends in rulers, as torchrun's, the reason is the error that was raised first."""
    command = "echo '[rank0]: ValueError: 3 ranks'; echo ChildFailedError:; echo ======; exit 1"
    assert Measuring.by_command(command, None, 20.0).measure(tmp_path).reason == "exit status 1: ValueError: 3 ranks"


def test_pattern(tmp_path: Path) -> None:
    """A pattern reads times in ms; the median of the second half is that of settled steps. The plan is in the
    directory that the environment names."""
    (tmp_path / "plan.json").write_text("{}")
    command = f'test -e "${CANDIDATE}/plan.json" && for t in 90 50 8 10 9; do echo "step: $t ms"; done'
    assert Measuring.by_command(command, r"step: ([\d.]+) ms", 20.0).measure(tmp_path).step_ns == 9e6
    for pattern in ("step", "("):
        with pytest.raises(InputError, match="--pattern"):
            Measuring.by_command(command, pattern, 20.0)


@pytest.mark.parametrize("ends", ["killed", "timed out", "done"])
def test_no_process_is_left(tmp_path: Path, ends: str) -> None:
    """However a measurement ends, SIGKILL of who measures included, so do all processes of the command, those too that
    left its group as torchrun's do, and whose parent is gone."""
    pids = tmp_path / "pids"
    last = "true" if ends == "done" else "sleep 60; true"
    command = f"(setsid sh -c 'sleep 60 & echo $! $$ >> {pids}; wait' &); while ! test -s {pids}; do :; done; {last}"
    script = f"""
from pathlib import Path
from gdp.tune.measuring import Measuring
Measuring.by_command({command!r}, None, {2.0 if ends == "timed out" else 60.0}).measure(Path({str(tmp_path)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        if ends == "killed":
            process.kill()
        process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


def wait_until(is_true: Callable[[], bool], most_s: float = 30.0) -> None:
    ends_s = time.monotonic() + most_s
    while not is_true():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """A process that is killed at any moment loses the measurement that ran, at most: others are in the log, whole."""
    script = f"""
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from gdp.tune.measuring import Measured
from gdp.tune.tuning import LoggedCandidate, Tuning
rows = [LoggedCandidate(str(n), 1000, 0.15, True, [float(n)]) for n in range(400)]
tuning = Tuning.begin(Path({str(tmp_path)!r}), {QUESTION!r}, rows)
def measure(directory):
    time.sleep(0.02)
    return Measured("ok", 1000.0, 0.01)
tuning.run(measure, most=400, ends_s=inf, on_measured=lambda line: print(line.candidate, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(5)]
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split()]
    resumed = Tuning.resume(tmp_path, QUESTION)
    known = [line.candidate for line in resumed.measurements]
    assert known[: len(told)] == told
    assert len(known) - len(told) <= 1
    assert run(resumed, dict.fromkeys(range(400), 1000.0), most=len(known) + 1) == [*known, len(known)]


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    """Of a log whose last line is not whole the others are read, and new ones follow them."""
    tuning = Tuning.begin(tmp_path, QUESTION, candidates(100, 105, 110, first=3))
    run(tuning, {0: 100, 1: 105, 2: 110}, most=2)
    with open(tmp_path / LOG, "ab") as file:
        file.write(b'{"candidate": 2, "bef')
    resumed = Tuning.resume(tmp_path, QUESTION)
    assert run(resumed, {2: 90.0}) == [0, 1, 2]
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [json.loads(line)["candidate"] for line in lines[1:]] == [0, 1, 2]
    assert LoggedMeasurement(**json.loads(lines[-1])).step_ns == 90


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is not a log"), ("{}\n", "is not a log"), ('{"format": "gdp-tune", "version": 1}\n', "is not a log")],
)
def test_other_logs_are_refused(tmp_path: Path, text: str, says: str) -> None:
    """A file that is no log, or one of another question, is refused in a line."""
    (tmp_path / LOG).write_text(text)
    with pytest.raises(InputError, match=says):
        Tuning.resume(tmp_path, QUESTION)
    Tuning.begin(tmp_path, QUESTION, candidates(100))
    for other, told in (({"model": "other"}, "MODEL"), ({"options": {"max_memory": "1GB"}}, "--max-memory")):
        with pytest.raises(InputError, match=f"begun with another {told}"):
            Tuning.resume(tmp_path, QUESTION | other)
