"""The least HTTP client there can be: on the machine under test, a client's own work would be measured too."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


async def post(host: str, port: int, path: str, body: dict[str, Any]) -> Reply:
    """One request on a connection of its own. The body is as on the wire, chunk sizes included."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        pieces = []
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
        head_bytes, _, rest = b"".join(pieces).partition(b"\r\n\r\n")
        first, *lines = head_bytes.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Reply(int(first.split()[1]), headers, rest)
    finally:
        writer.close()
