"""A hub on loopback that keeps what it is sent: what huggingface_hub's client needs to make a repository and commit.

Small files only: what it is asked to take, it takes in the commit itself.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_made_up"


@dataclass
class Hub:
    """`repositories`: what each was created with; `files`: by repository and path; `asked`: every request's path.

    `refuses` is None, or the status and the words with which writing is refused.
    """

    url: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuses: tuple[int, str] | None = None

    def answer(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request."""
        self.asked.append(path)
        if self.refuses or token != f"Bearer {TOKEN}":
            status, words = self.refuses or (401, "Invalid credentials in Authorization header")
            return status, {"error": words}
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        _, _, _, owner, name, action, *_ = path.split("/")
        if action == "preupload":
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        return self.commit(f"{owner}/{name}", body)

    def create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """As the hub does: what is there already stays as it is."""
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.repositories
        self.repositories.setdefault(name, asked)
        return (409 if known else 200), {"url": f"{self.url}/{name}"}

    def commit(self, repository: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Keep the files of one commit."""
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[repository, line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/{repository}/commit/c0ffee", "commitOid": "c0ffee"}


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that listens on a port of its own until the block ends."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, said = state.answer(self.path.partition("?")[0], self.headers.get("Authorization", ""), body)
            payload = json.dumps(said).encode()
            self.send_response(status)
            if "error" in said:
                self.send_header("X-Error-Message", said["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def do_GET(self) -> None:
            state.asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
