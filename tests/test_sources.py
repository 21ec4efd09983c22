"""Where rows come from: pieces of files, damaged files, and a hub that refuses."""

import gzip
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import arguments, talker_folder

from data_builders import corpora, sources
from data_builders.corpora.protocol import Origin
from data_builders.sources import Piece, Unreadable
from recipes.errors import UserError

ROOT = Path(__file__).parents[1]
OWN = Origin(hub=None)


def read(file, columns=()):
    """All (number, row) of a file and its pieces, each piece read by itself."""
    pieces = list(sources.plan("c", file))
    return [row for piece in pieces for row in sources.rows(piece, columns)], pieces


def write(path, lines, end=b"\n"):
    content = b"\n".join(lines) + end
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 5_000])
@pytest.mark.parametrize("block", [1, 5, 1 << 22])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("end", [b"\n", b"", b"\n\n\r\n"])
def test_pieces_of_lines_cover_them_once_and_in_order(tmp_path, monkeypatch, rows, block, name, end):
    """Only a line feed ends a line; blank lines count and are no rows; a mark of byte order and CRLF do no harm."""
    monkeypatch.setattr(sources, "ROWS", rows)
    monkeypatch.setattr(sources, "_BLOCK", block)
    texts = ["one", "two\u2028\x85\x0b\x1c\u2029still", "é字\U0001f600", "", "six", "seven", "eight"]
    lines = [json.dumps({"t": text}, ensure_ascii=False).encode() for text in texts]
    lines = [b"\xef\xbb\xbf" + lines[0], lines[1] + b"\r", b"", lines[2], b"  \t", *lines[3:]]
    found, pieces = read(write(tmp_path / name, lines, end))
    assert found == [(n, {"t": text}) for n, text in zip((1, 2, 4, 6, 7, 8, 9), texts, strict=True)]
    if name == "a.jsonl":
        size = (tmp_path / name).stat().st_size
        assert [piece.begin for piece in pieces] + [size] == [0] + [piece.end for piece in pieces]
        count = len(lines) + {b"\n": 0, b"": 0, b"\n\n\r\n": 2}[end]
        assert len(pieces) == -(-count // rows)
        assert [piece.first for piece in pieces] == list(range(1, count + 1, rows))
    else:
        assert pieces == [Piece("c", str(tmp_path / name), 0, (tmp_path / name).stat().st_size, 1)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_lines_has_no_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name)[0] == []


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 100])
def test_pieces_of_parquet_are_whole_row_groups(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(sources, "ROWS", rows)
    path = tmp_path / "a.parquet"
    table = pa.table({"n": list(range(10)), "other": list("abcdefghij")})
    pq.write_table(table, path, row_group_size=3)
    found, pieces = read(path, ("n", "absent"))
    assert found == [(n + 1, {"n": n}) for n in range(10)]
    assert read(path)[0] == [(n + 1, row) for n, row in enumerate(table.to_pylist())]
    assert [piece.begin for piece in pieces] + [4] == [0] + [piece.end for piece in pieces]
    assert [piece.first for piece in pieces] == [1 + 3 * piece.begin for piece in pieces]
    assert len(pieces) == {1: 4, 3: 4, 4: 2, 5: 2, 100: 1}[rows]
    pq.write_table(table[:0], path)
    assert read(path)[0] == []


def test_a_parquet_file_without_a_wanted_column_has_empty_rows(tmp_path):
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", ("text",))[0] == [(1, {}), (2, {})]


@pytest.mark.parametrize("compliant", [True, False])
def test_a_flag_is_read_whatever_the_writer_calls_a_lists_elements(tmp_path, compliant):
    """ "list.element" or, of older writers, "list.item": a moderation that went unread would flag nothing."""
    columns = corpora.lmsys.COLUMNS
    row = {
        "conversation_id": "a",
        "conversation": [{"content": "Hi.", "role": "user"}],
        "openai_moderation": [{"categories": {"hate/threatening": True}, "flagged": True}],
        "model": "m",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet", use_compliant_nested_type=compliant)
    [(_, found)] = read(tmp_path / "a.parquet", columns)[0]
    assert found["openai_moderation"][0]["flagged"] is True
    assert corpora.lmsys.conversation(found).flagged
    assert found["conversation"] == row["conversation"]
    assert "model" not in found


BROKEN = [
    (b'{"t": ', "not JSON (Expecting value)"),
    (b"{} {}", "not JSON (Extra data)"),
    (b"[1]", "an object is due, here is list"),
    (b'"text"', "an object is due, here is str"),
    (b"null", "an object is due, here is NoneType"),
    (b'{"t": "\xff\xfe"}', "not UTF-8 (invalid start byte)"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"t": ' + b"1" * 5_000 + b"}", "a number of too many digits"),
    ("".join(f"{char}\0" for char in '{"t": 1}').encode(), "not JSON"),
]


@pytest.mark.parametrize(("line", "fault"), BROKEN)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_broken_line_is_one_row(tmp_path, line, fault, name):
    found, _ = read(write(tmp_path / name, [b'{"t": 1}', line, b'{"t": 3}']))
    assert found[0] == (1, {"t": 1})
    assert found[2] == (3, {"t": 3})
    number, broken = found[1]
    assert number == 2
    assert isinstance(broken, Unreadable)
    assert broken.fault.startswith(fault)
    assert len(found) == 3


def test_a_string_of_parquet_that_is_not_utf8_is_one_row(tmp_path):
    texts = [f"row {n}".encode() for n in range(7)]
    texts[3] = b"\xff\xfe"
    column = pa.Array.from_buffers(pa.string(), 7, pa.array(texts, pa.binary()).buffers())
    pq.write_table(pa.table({"t": column}), tmp_path / "a.parquet")
    found, _ = read(tmp_path / "a.parquet")
    assert [number for number, _ in found] == list(range(1, 8))
    assert found[3][1] == Unreadable("not UTF-8 (invalid start byte)")
    assert [row for _, row in found[:3] + found[4:]] == [{"t": f"row {n}"} for n in (0, 1, 2, 4, 5, 6)]


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbled(path):
    """Beyond the header, so that it is the packed data that cannot be read."""
    content = bytearray(path.read_bytes())
    content[10:30] = b"\xff" * 20
    path.write_bytes(content)


def other(path):
    path.write_bytes(b"This is plain text.\n" * 9)


@pytest.mark.parametrize("damage", [truncated, garbled, other])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_a_damaged_file_is_one_clear_error(tmp_path, name, damage):
    path = tmp_path / name
    if name == "a.parquet":
        numbers = pa.table({"n": [os.urandom(20).hex() for _ in range(500)]})
        pq.write_table(numbers, path, compression="gzip", use_dictionary=False)
    else:
        write(path, [json.dumps({"t": os.urandom(20).hex()}).encode() for _ in range(500)])
    damage(path)
    with pytest.raises(UserError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "cannot be read (" in said
    assert said.endswith("; give a whole file")
    assert "\n" not in said


def test_a_row_that_is_typed_otherwise_is_read_as_it_is(tmp_path):
    """A null in a column for 19,999 rows, an id that turns from number to string: no type is fixed by the first."""
    lines = [json.dumps({"id": n, "system": None, "text": "a"}).encode() for n in range(19_999)]
    lines.append(json.dumps({"id": "last", "system": "Be brief.", "text": "a"}).encode())
    found, pieces = read(write(tmp_path / "a.jsonl", lines))
    assert len(pieces) == 4
    assert [number for number, _ in found] == list(range(1, 20_001))
    assert found[19_998][1] == {"id": 19_998, "system": None, "text": "a"}
    assert found[19_999][1] == {"id": "last", "system": "Be brief.", "text": "a"}
    last = corpora.jsonl.conversation(found[-1][1])
    assert (last.id, last.turns) == ("own/last", (("user", "a"),))


def test_files_of_a_folder_by_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "deep/er/c.parquet", "README.md", "script.py", "d.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "dataset.parquet").mkdir()  # as Spark writes them
    (tmp_path / "dataset.parquet" / "part-0.parquet").write_bytes(b"")
    names = ["a.jsonl.gz", "b.jsonl", "dataset.parquet/part-0.parquet", "deep/er/c.parquet"]
    assert sources.files("c", OWN, str(tmp_path)) == [tmp_path / name for name in names]
    assert sources.files("c", OWN, str(tmp_path / "b.jsonl")) == [tmp_path / "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("absent", (), "data.paths.lmsys: {} is not there; give a file or folder of the corpus' rows"),
        (".", (), "{}: holds no file that ends in .jsonl, .jsonl.gz, .parquet; give one: data.paths.lmsys=PATH"),
        (".", ("a.json", "b.csv"), "{}: holds no file that ends in .jsonl"),
        ("a.json", ("a.json",), "{}: give a file that ends in .jsonl, .jsonl.gz, .parquet"),
        (
            ".",
            ("lmsys.py", "README.md"),
            "{}: holds a loading script and no rows; scripts are not run. Take the Parquet",
        ),
    ],
)
def test_a_place_without_rows_says_what_to_do(tmp_path, name, files, said):
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError) as caught:
        sources.files("lmsys", corpora.lmsys.ORIGIN, str(tmp_path / name))
    assert str(caught.value).startswith(said.format(tmp_path / name))
    if "script" in said:
        assert "Parquet files of its branch refs/convert/parquet" in str(caught.value)
        assert "data.paths.lmsys=PATH" in str(caught.value)


def test_a_corpus_that_is_not_on_the_hub_needs_its_file():
    with pytest.raises(UserError, match=r"mine is not on the hub; give its file: data\.paths\.mine=PATH"):
        sources.files("mine", OWN, None)


ROW = json.dumps({"instruction": "Sort it. Then stop.", "output": "Done."}).encode() + b"\n"
JSON = {"Content-Type": "application/json"}
GATED = {**JSON, "X-Error-Code": "GatedRepo", "X-Error-Message": "Access to the dataset is restricted."}
REFUSALS = {
    "401": (401, {**JSON, "X-Error-Message": "Invalid username or password."}),
    "403 gated": (403, GATED),
    "403": (403, JSON),
    "404": (404, {**JSON, "X-Error-Code": "RepoNotFound"}),
    "500": (500, JSON),
}


def answer(path, mode):
    """(status, headers, body) of the stand-in: as the hub's own, as far as its client looks at them."""
    if mode in REFUSALS:
        return *REFUSALS[mode], b"{}"
    if "/tree/" in path:
        names = {"script": ["loading.py"], "nothing": ["README.md"]}.get(mode, ["train.jsonl", "other/x.parquet"])
        entries = [{"type": "file", "path": name, "size": len(ROW), "oid": "b" * 40} for name in names]
        return 200, JSON, json.dumps(entries).encode()
    if path.startswith("/api/"):
        return 200, JSON, json.dumps({"id": "x/y", "sha": "a" * 40, "siblings": []}).encode()
    if mode == "gated file":  # of a gated dataset anyone may see the list
        return 401, GATED, b"{}"
    return 200, {"ETag": '"e"', "X-Repo-Commit": "a" * 40}, ROW


@contextmanager
def stub_hub(mode):
    """The address of a hub on loopback; with mode "down", of none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answer(self.path, mode)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        if mode == "down":
            server.shutdown()
            server.server_close()
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def with_hub(mode, home, *command):
    """Run Python with the stub as its hub, nothing in the cache and no token."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    with stub_hub(mode) as address:
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**clean, **hub}, capture_output=True, text=True, timeout=120
        )


ASK = """
import sys
from data_builders import corpora, sources
from recipes.errors import UserError

module = corpora.module("evol_codealpaca")
try:
    for file in sources.files(module.NAME, module.ORIGIN, None):
        print(file)
except UserError as error:
    sys.exit(str(error))
"""
EVOL = "theblackcat102/evol-codealpaca-v1"
LOCAL = "give a local file of the same schema: data.paths.evol_codealpaca=PATH"
TERMS = f"access refused; accept its terms on https://huggingface.co/datasets/{EVOL} and set a token"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("401", TERMS),
        ("403 gated", TERMS),
        ("403", TERMS),
        ("gated file", TERMS),
        ("404", "the hub does not give it (404 Client Error.)"),
        ("500", "the hub does not give it (Server error '500"),
        ("down", "the hub cannot be reached ("),
        ("script", "holds a loading script and no rows; scripts are not run. Take the Parquet files of its branch"),
        ("nothing", "holds no file that ends in .jsonl"),
    ],
)
def test_a_hub_that_does_not_give_a_corpus_is_one_clear_line(tmp_path, mode, said):
    done = with_hub(mode, tmp_path, "-c", ASK)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.rstrip("\n").rpartition("\n")[2]
    assert line.startswith(f"{EVOL}: {said}"), done.stderr
    assert line.endswith("data.paths.evol_codealpaca=PATH")
    assert LOCAL in line or mode in ("script", "nothing")


def test_what_the_hub_gives_is_read_and_no_file_beside_it(tmp_path):
    """The cache may hold other files of the dataset, which another program fetched."""
    snapshot = tmp_path / "hub" / f"datasets--{EVOL.replace('/', '--')}" / "snapshots" / ("a" * 40)
    (snapshot / "other").mkdir(parents=True)
    (snapshot / "other" / "x.parquet").write_bytes(b"")
    done = with_hub("sound", tmp_path, "-c", ASK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(snapshot / "train.jsonl")]
    assert (snapshot / "train.jsonl").read_bytes() == ROW


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return talker_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("mode", ["401", "403 gated"])
def test_a_build_that_is_refused_ends_with_2_and_leaves_nothing(tmp_path, model, mode):
    run = tmp_path / "run"
    given = arguments(model, run, "data.corpora=[lmsys]", "data.benchmarks=[]")
    done = with_hub(mode, tmp_path / "home", "data_builders/build.py", *given)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "error: lmsys/lmsys-chat-1m: access refused; accept its terms on https://huggingface.co/"
    )
    assert done.stderr.count("\n") == 1
    assert "data.paths.lmsys=PATH" in done.stderr
    assert not run.exists() or not list(run.rglob("*"))
