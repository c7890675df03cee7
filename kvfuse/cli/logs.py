"""The daemon's log: a file, stderr or systemd's journal; lines for people, or an object of JSON a line."""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import os
import socket
import sys
import time
from pathlib import Path

from kvfuse import serving
from kvfuse.cli.console import LogFormatter
from kvfuse.errors import ConfigError
from kvfuse.options.options import LogOptions

SICK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""what a disk answers on which a volume is served all the same, without its log"""
JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
IDENTIFIER = "kvfuse"
DATAGRAM_MAX = 128 << 10
"""bytes of a message to the journal; the rest is cut"""
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""least level -> priority of syslog(3)"""
TEXT = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s%(serving)s"
JOURNAL_TEXT = "%(name)s: %(message)s%(serving)s"
"""the journal has time, process and priority itself"""


def priority_of(record: logging.LogRecord) -> int:
    return next(priority for level, priority in PRIORITIES if record.levelno >= level)


def note_request(record: logging.LogRecord) -> bool:
    """A filter, which lets all pass: adds the request that is served where the line is written."""
    request = serving.described()
    vars(record).update(request=request, serving=f" [{request}]" if request is not None else "")
    return True


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, pid, mount; request and exception where there are any."""

    def __init__(self, mount: str) -> None:
        super().__init__()
        self._mount = mount

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "mount": self._mount,
        }
        if (request := getattr(record, "request", None)) is not None:
            content["request"] = request
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


class PriorityFormatter(LogFormatter):
    """Lines as systemd takes them from stderr: each begins with its priority."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{priority_of(record)}>"
        return "\n".join(prefix + line for line in super().format(record).split("\n"))


class JournalHandler(logging.Handler):
    """Sends each line to systemd's journal, in its own protocol, with the mount and the request as fields."""

    def __init__(self, path: Path, mount: str) -> None:
        super().__init__()
        self._path = path
        self._mount = mount
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def emit(self, record: logging.LogRecord) -> None:
        """A journal that is away, or full, costs lines, and never raises."""
        try:
            self._socket.sendto(self._encode(record), os.fspath(self._path))
        except OSError:
            pass

    def _encode(self, record: logging.LogRecord) -> bytes:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(priority_of(record)),
            "SYSLOG_IDENTIFIER": IDENTIFIER,
            "KVFUSE_MOUNT": self._mount,
            "KVFUSE_REQUEST": getattr(record, "request", None) or "",
        }
        return b"".join(_encode_field(name, text) for name, text in fields.items() if text)

    def close(self) -> None:
        self._socket.close()
        super().close()


def _encode_field(name: str, text: str) -> bytes:
    """NAME=VALUE, or with the value's size where it has several lines."""
    data = text.encode("utf-8", "backslashreplace")[:DATAGRAM_MAX]
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


class LogFile(logging.handlers.WatchedFileHandler):
    """A log, opened anew after logrotate moved it. A sick disk below costs lines of it, and never raises."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, delay=True)
        try:
            self.stream = self._open()
            self._statstream()
        except OSError as error:
            if error.errno not in SICK:
                raise

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start_logging(options: LogOptions, default_file: Path | None, mount: Path | str = "") -> None:
    """Log to the journal, or to ``options.file``, else to ``default_file``, else to stderr. ``mount``: whose log it is.

    ConfigError: the journal is wanted, and there is none.
    """
    handler = _make_handler(options, default_file, str(mount))
    handler.addFilter(note_request)
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    logging.getLogger("hpack").setLevel(logging.WARNING)  # else lines for new headers of a record store


def _make_handler(options: LogOptions, default_file: Path | None, mount: str) -> logging.Handler:
    if options.journal:
        if not JOURNAL_SOCKET.is_socket():
            raise ConfigError(f"log.journal: this machine has no journal ({JOURNAL_SOCKET}): leave log.journal out")
        journal = JournalHandler(JOURNAL_SOCKET, mount)
        journal.setFormatter(JsonFormatter(mount) if options.format == "json" else LogFormatter(JOURNAL_TEXT))
        return journal
    file = options.file or default_file
    if file and not options.file:
        file.parent.mkdir(parents=True, exist_ok=True)
    handler: logging.Handler = LogFile(file) if file else logging.StreamHandler()
    if options.format == "json":
        handler.setFormatter(JsonFormatter(mount))
    elif file is None and options.journal is not False and is_journal(sys.stderr.fileno()):
        handler.setFormatter(PriorityFormatter(JOURNAL_TEXT))
    else:
        handler.setFormatter(LogFormatter(TEXT))
    return handler


def is_journal(descriptor: int) -> bool:
    """systemd says by JOURNAL_STREAM which file is its journal: DEVICE:INODE."""
    try:
        figures = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{figures.st_dev}:{figures.st_ino}"
