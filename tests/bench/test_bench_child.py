"""Parts of a benchmark that run in processes of their own."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.common.child import ChildFailed, ask

CHILD = """
import os, sys, threading, time
from bench.common.child import serve

def handle(request):
    print("noise")
    os.write(1, b"noise of a library\\n")
    threading.Thread(target=time.sleep, args=(600,)).start()  # it must not keep the process
    for number in request["numbers"]:
        yield number * 2
    if request["end"] == "raise":
        raise ValueError("no more")
    if request["end"] == "die":
        print("its last words", file=sys.stderr, flush=True)
        os._exit(3)
    if request["end"] == "hang":
        time.sleep(600)

serve(handle)
"""


@pytest.mark.parametrize(
    ("end", "match"),
    [
        ("return", None),
        ("raise", "^ValueError: no more$"),
        ("die", "ended with code 3: .*its last words"),
        ("hang", "not done within 3 s"),
    ],
)
def test_a_child_answers_until_its_end_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, match: str | None
) -> None:
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    with nullcontext() if match is None else pytest.raises(ChildFailed, match=f"(?s){match}"):
        for answer in ask("some_child", {"numbers": [1, 2], "end": end}, 3.0 if end == "hang" else 60.0):
            found.append(answer)
    assert found == [2, 4]
