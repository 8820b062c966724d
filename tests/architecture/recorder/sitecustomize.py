"""Recorder of a traced service: Python loads this file at the start of each of its processes.

It does nothing unless `SERVICE_RECORDER_FOLDER` names a folder. There every process which has
imported the project writes its name into `processes/`, follows the orders in the file `order`
(`NUMBER VERB`), and answers with `answers/NUMBER.PID`, in JSON. The verbs are the public methods
of `Recorder`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER_VARIABLE = "SERVICE_RECORDER_FOLDER"
OWNER_VARIABLE = "SERVICE_RECORDER_OWNER"
"""The process that measures; the command that it started ends the service when it has gone."""
LOOK_INTERVAL_S = 0.05
PACKAGES = ("quadriga", "actors", "serve_app")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))) + os.sep
OURS = tuple(ROOT + name + os.sep for name in PACKAGES)

_Chain = tuple[int, ...]


class Recorder:
    """Records which functions are called, and which objects live, in this process."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType | None] = {}
        self._chains: set[_Chain] = set()
        self._held: list[object] = []
        self._is_own = _OwnTypes()

    def trace(self) -> None:
        """Begin to record calls in every thread."""
        self._chains = set()
        _set_profile(self._called)

    def stop(self) -> dict[str, Any]:
        """End the recording and return what was called.

        Returns:
            functions: `[file, first line, last line]` of each, by its number.
            chains: Lists of such numbers, the project's functions on a thread's stack from the
                outermost to the one that was called.
        """
        _set_profile(None)
        chains, self._chains = self._chains, set()
        functions = {
            number: [
                code.co_filename.removeprefix(ROOT),
                code.co_firstlineno,
                max(line or 0 for *_, line in code.co_lines()),
            ]
            for number, code in list(self._codes.items())
            if code is not None
        }
        return {"functions": functions, "chains": list(chains)}

    def modules(self) -> list[str]:
        """Return the project's modules that this process has imported."""
        return sorted(name for name in list(sys.modules) if name.split(".")[0] in PACKAGES)

    def count(self) -> dict[str, int]:
        """Return how many instances of each of the project's classes are alive."""
        import gc

        gc.collect()
        return _by_class(self._instances())

    def hold(self) -> None:
        """Refer to every instance of the project's classes that is alive now."""
        self._held = self._instances()

    def still_alive(self) -> dict[str, int]:
        """Count and release those held that something other than the recorder refers to.

        An object that only dropped ones refer to is dropped too. So what lives for a step only
        is not counted, even where every step makes as many anew.
        """
        held, self._held = self._held, []
        num_before = len(held) + 1
        while len(held) < num_before:
            num_before = len(held)
            for i in reversed(range(num_before)):
                if sys.getrefcount(held[i]) == 2:  # the list's and the argument's
                    held[i] = held[-1]
                    held.pop()
        return _by_class(held)

    def _instances(self) -> list[object]:
        import gc

        is_own = self._is_own
        return [o for o in gc.get_objects() if is_own[type(o)]]

    def _called(self, frame: FrameType | None, event: str, _: object) -> None:
        if event != "call" or frame is None or self._own(frame.f_code) is None:
            return
        chain = []
        while frame is not None:
            if self._own(frame.f_code) is not None:
                chain.append(id(frame.f_code))
            frame = frame.f_back
        self._chains.add(tuple(reversed(chain)))

    def _own(self, code: CodeType) -> CodeType | None:
        """The code itself, which is kept, where it is of a function of the project."""
        number = id(code)
        if number not in self._codes:
            is_own = code.co_filename.startswith(OURS) and code.co_name != "<module>"
            self._codes[number] = code if is_own else None
        return self._codes[number]


class _OwnTypes(dict[type, bool]):
    """Whether a type is defined in the project, found out once for each."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = str(kind.__module__).partition(".")[0] in PACKAGES
        return self[kind]


def _by_class(objects: list[object]) -> dict[str, int]:
    from collections import Counter

    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in objects)


def _set_profile(called: Any) -> None:
    """Call this on every call of a Python function, in all threads, those to come too."""
    if sys.version_info >= (3, 12):
        threading.setprofile_all_threads(called)
        return
    import ctypes

    threading.setprofile(called)
    python = ctypes.pythonapi
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    python.PyInterpreterState_ThreadHead.restype = ctypes.c_void_p
    python.PyInterpreterState_ThreadHead.argtypes = [ctypes.c_void_p]
    python.PyThreadState_Next.restype = ctypes.c_void_p
    python.PyThreadState_Next.argtypes = [ctypes.c_void_p]
    python._PyEval_SetProfile.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function = None
    if called is not None:

        def call(_: Any, frame: FrameType, what: int, __: Any) -> int:
            if what == 0:
                called(frame, "call", None)
            return 0

        kind = ctypes.PYFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
        )
        keeper = kind(call)
        _keepers.append(keeper)  # a thread may be within it when it is taken away
        function = ctypes.cast(keeper, ctypes.c_void_p)
    thread = python.PyInterpreterState_ThreadHead(python.PyInterpreterState_Get())
    while thread:
        python._PyEval_SetProfile(thread, function, None)
        thread = python.PyThreadState_Next(thread)


_keepers: list[Any] = []


def _follow(folder: str) -> None:
    import json
    import time
    import traceback

    owner, seen = os.environ.get(OWNER_VARIABLE), ""
    is_first = str(os.getppid()) == owner
    recorder = Recorder()
    while not any(name in sys.modules for name in PACKAGES):
        time.sleep(LOOK_INTERVAL_S)
    open(f"{folder}/processes/{os.getpid()}", "w").close()
    while True:
        time.sleep(LOOK_INTERVAL_S)
        if is_first and str(os.getppid()) != owner:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        try:
            with open(f"{folder}/order") as file:
                order = file.read()
        except OSError:
            continue
        if order == seen:
            continue
        seen = order
        number, verb = order.split()
        try:
            answer = getattr(recorder, verb)()
        except Exception:
            answer = {"error": traceback.format_exc()}
        path = f"{folder}/answers/{number}.{os.getpid()}"
        with open(path + ".part", "w") as file:
            json.dump(answer, file)
        os.replace(path + ".part", path)


if _folder := os.environ.get(FOLDER_VARIABLE):
    threading.Thread(target=_follow, args=(_folder,), name="recorder", daemon=True).start()
