# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A stand-in for the Hugging Face Hub: as much of its HTTP API as pushing and loading models takes.

https://huggingface.co/docs/hub/api; files of 10 MB and more, and all safetensors, take the way of
git-lfs (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md), as there.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


class FakeHub(ThreadingHTTPServer):
    """Model repositories in memory, each with one branch, main."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}  # by name, then path
        self.commits: dict[str, str] = {}  # the last one, by repository
        self.lfs: dict[str, bytes] = {}  # by SHA-256

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str, lines: list[dict]) -> str:
        """Applies the lines of a commit, and returns its id."""
        files = self.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        digests = [(path, hashlib.sha1(content).hexdigest()) for path, content in files.items()]
        self.commits[repo] = hashlib.sha1(repr(sorted(digests)).encode()).hexdigest()
        return self.commits[repo]


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *arguments):
        pass

    def do_GET(self):  # noqa: N802
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def answer(self):
        """Finds what answers: the routes are tried in order."""
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match [self.command, *parts]:
            case ["PUT", "lfs", oid] if hashlib.sha256(self.body).hexdigest() == oid:
                self.server.lfs[oid] = self.body
                self.reply({})
            case ["GET", "api", "whoami-v2"]:
                self.reply({"type": "user", "name": "someone", "orgs": []})
            case ["POST", "api", "validate-yaml"]:
                self.reply({"errors": [], "warnings": []})
            case ["POST", "api", "repos", "create"] if self.is_allowed():
                self.create(json.loads(self.body))
            case ["POST", "api", "models", owner, name, "preupload", "main"]:
                self.preupload(json.loads(self.body)["files"])
            case ["POST", owner, name, "info", "lfs", "objects", "batch"] if self.is_allowed():
                self.lfs_batch(json.loads(self.body)["objects"])
            case ["POST", "api", "models", owner, name, "commit", "main"] if self.is_allowed():
                oid = self.server.commit(
                    f"{owner}/{name}", list(map(json.loads, self.body.splitlines()))
                )
                url = f"{self.server.url}/{owner}/{name}/commit/{oid}"
                self.reply({"success": True, "commitOid": oid, "commitUrl": url})
            case ["GET", "api", "models", owner, name] | [
                "GET",
                "api",
                "models",
                owner,
                name,
                "revision",
                _,
            ]:
                self.info(f"{owner}/{name}")
            case ["GET", "api", "models", owner, name, "tree", _, *folder]:
                self.tree(f"{owner}/{name}", "/".join(folder))
            case ["GET" | "HEAD", owner, name, "resolve", _, *path]:
                self.resolve(f"{owner}/{name}", "/".join(path))
            case _:
                self.reply({"error": "not here"}, 404)

    def is_allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def create(self, wanted: dict):
        repo = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        status = 409 if repo in self.server.repos else 200
        self.server.repos.setdefault(repo, {})
        self.server.commits.setdefault(repo, "0" * 40)
        self.reply({"url": f"{self.server.url}/{repo}", "name": repo}, status)

    def preupload(self, files: list[dict]):
        modes = {True: "lfs", False: "regular"}
        self.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": modes[
                            file["path"].endswith(".safetensors") or file["size"] >= 10**7
                        ],
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        )

    def lfs_batch(self, objects: list[dict]):
        for wanted in objects:
            if wanted["oid"] not in self.server.lfs:
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"}}
        self.reply({"transfer": "basic", "objects": objects})

    def info(self, repo: str):
        if repo not in self.server.repos:
            return self.reply({"error": "Repository not found"}, 404, "RepoNotFound")
        self.reply(
            {
                "id": repo,
                "modelId": repo,
                "sha": self.server.commits[repo],
                "private": False,
                "tags": [],
                "siblings": [{"rfilename": path} for path in self.server.repos[repo]],
            }
        )

    def tree(self, repo: str, folder: str):
        paths = [path for path in self.server.repos.get(repo, {}) if path.startswith(folder)]
        if not paths:
            return self.reply({"error": "nothing there"}, 404, "EntryNotFound")
        entries = [(path, self.server.repos[repo][path]) for path in paths]
        self.reply(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for path, content in entries
            ]
        )

    def resolve(self, repo: str, path: str):
        if repo not in self.server.repos:
            return self.reply({"error": "Repository not found"}, 404, "RepoNotFound")
        headers = {"X-Repo-Commit": self.server.commits[repo]}
        content = self.server.repos[repo].get(path)
        if content is None:
            return self.reply({"error": "Entry not found"}, 404, "EntryNotFound", headers)
        headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self.send(content, 200, headers)

    def reply(
        self, value, status: int = 200, error: str | None = None, headers: dict | None = None
    ):
        headers = {"Content-Type": "application/json", **(headers or {})}
        if error is not None:
            headers["X-Error-Code"] = error
        self.send(json.dumps(value).encode(), status, headers)

    def send(self, content: bytes, status: int, headers: dict):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
