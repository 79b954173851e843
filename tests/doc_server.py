"""Runs commands of pages in forks of one process, which has loaded gdp and PyTorch: that takes seconds of each.

python doc_server.py serve NUMBER               forks for each request to a socket, until its standard input ends
python doc_server.py SOCKET gdp WORD ...        runs `gdp WORD ...` in a fork
python doc_server.py SOCKET python              executes blocks of Python in a fork
"""

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


def run_blocks() -> int:
    """Executes blocks of Python, which come as lines of JSON, and answers each with its output."""
    answers, names = sys.stdout, {"__name__": "__main__"}
    for line in sys.stdin:
        block, printed, failed = json.loads(line), io.StringIO(), ""
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(block["content"], block["label"], "exec"), names)
            except BaseException:
                failed = traceback.format_exc()
        print(json.dumps([printed.getvalue(), failed]), file=answers, flush=True)
    return 0


def serve(number: int) -> None:
    """Answers requests one after the other, each by a fork that watches over the command."""
    import gdp.execute.run
    import gdp.models.pytorch.capture_step  # noqa: F401
    from gdp.cli import main
    from gdp.planning.warm_up import warm_up

    warm_up()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that is loaded
    with socket.socket(fileno=number) as listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
                child = os.fork()
                if not child:
                    become(**json.loads(request), streams=streams)
                    run_and_exit({"gdp": main, "python": run_blocks}[sys.argv[0]])
                connection.send(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
                os._exit(0)
            connection.close()


def become(words: list[str], directory: str, environment: dict[str, str], streams: list[int]) -> None:
    """Makes this process the one that a shell would have started."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = words, directory


def run_and_exit(program: Callable[[], int]) -> NoReturn:
    """Leaves all that is loaded as it is: to free it takes Python a second."""
    status = 1
    try:
        status = program()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(path: str, words: list[str]) -> int:
    """Returns the exit status of a command that the server runs with the streams of this process."""
    request: dict[str, Any] = {"words": words, "directory": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        return connection.recv(1)[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
