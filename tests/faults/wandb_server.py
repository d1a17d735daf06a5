"""A local stand-in for W&B's server, good enough for a run to start on, that can stop answering."""
import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """`answers` False: connections are taken and never answered, as behind a dead proxy."""
    daemon_threads = True

    def __init__(self, answers: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = answers, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("utf-8", "replace")
        self.server.asked.append((self.path, body[:300]))
        while not self.server.answers:
            time.sleep(0.2)
        found = json.dumps(reply(self.path, body, self.server.url)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def handle(self):
        with suppress(ConnectionError):             # the client has gone
            super().handle()

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def log_message(self, *_):
        pass


def reply(path: str, body: str, url: str) -> dict:
    if "graphql" not in path:
        return {"exitcode": None, "limits": {}}
    asked = json.loads(body)
    query = asked.get("query", "")
    entity = {"id": "e", "name": "me"}
    project = {"id": "p", "name": "cory", "entity": entity}
    bucket = {"id": "b", "name": "run", "displayName": "run", "description": "", "config": "{}",
              "sweepName": None, "historyLineCount": 0, "project": project}
    operation = (re.search(r"(?:query|mutation)\s+(\w+)", query) or [None, ""])[1]
    if operation == "UpsertBucket":
        return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
    if operation == "Viewer":
        return {"data": {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}",
                                    "teams": {"edges": [{"node": {"name": "me"}}]}}}}
    if operation == "CreateRunFiles":
        files = [{"name": name, "uploadUrl": f"{url}/upload"} for name in asked["variables"]["files"]]
        return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
    return {"data": {}}
