"""kvfuse manual: man pages and completion for shells, made from the commands and options of this version.

The pages are in man(7)'s macros: what Click shows as help, the texts of mount.conf, and the words of ``-o``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path

import click

import kvfuse
from kvfuse.cli import BESIDE, COMMANDS, Failure, cli
from kvfuse.cli.console import say
from kvfuse.options import config

COMPLETIONS = {
    "bash": "bash-completion/completions/kvfuse",
    "zsh": "zsh/site-functions/_kvfuse",
    "fish": "fish/vendor_completions.d/kvfuse.fish",
}
"""shell -> file below a share folder where it looks for the completion of `kvfuse`"""
_KEY = re.compile(r"(?:# )?([a-z_]+) = ")


@click.command()
@click.argument("folder", type=Path)
@click.option("--remove", is_flag=True, help="Remove these files again.")
def manual(folder: Path, remove: bool) -> None:
    """Write man pages and completion for bash, zsh and fish below FOLDER, such as /usr/local/share.

    scripts/install does it. They say what this version has: write them again after an update.

    \b
    Examples:
      kvfuse manual /usr/local/share
      man kvfuse; man kvfuse.conf; man mount.kvfuse
    """
    for name, make in FILES.items():
        file = folder / name
        if remove:
            file.unlink(missing_ok=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make())
        say(file)


# -- pages --------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Text as troff shows it: no character is a command, hyphens can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.split("\n"))


def _head(name: str, section: int, what: str) -> Iterator[str]:
    yield f'.TH {escape(name)} {section} "" "kvfuse {kvfuse.__version__}" "kvfuse"'
    yield f".SH NAME\n{escape(name)} \\- {escape(what)}"


def _text(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that begin with \\b keep their lines."""
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        lines = [line.rstrip() for line in paragraph.split("\n")]
        if lines[0].strip() == "\b":
            yield ".PP\n.nf\n" + escape("\n".join(lines[1:])) + "\n.fi"
        else:
            yield ".PP\n" + escape("\n".join(line.strip() for line in lines))


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)) is not None:
            names, what = record
            yield f".TP\n.B {escape(names)}\n{escape(what) or '.'}"


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """A command, and those below it."""
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "{escape(context.command_path)} {escape(usage)}"'
    yield from _text(command.help or "")
    yield from _options(context)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            if (found := command.get_command(context, inner)) is not None:
                yield from _command(found, inner, context)


def make_kvfuse_page() -> str:
    """kvfuse(1): all commands."""
    context = click.Context(cli, info_name="kvfuse")
    lines = [*_head("kvfuse", 1, "a file system for KV caches")]
    lines += [".SH SYNOPSIS", ".B kvfuse", "COMMAND [ARGUMENTS]", ".SH DESCRIPTION", *_text(cli.help or "")]
    lines.append(".SH COMMANDS")
    for name, (target, summary) in COMMANDS.items():
        if target == BESIDE:
            lines += [f'.SS "kvfuse {escape(name)}"', escape(summary), "It is a package of its own."]
        elif (command := cli.get_command(context, name)) is not None:
            lines += _command(command, name, context)
    lines += [".SH ENVIRONMENT", ".TP\n.B KVFUSE_DEBUG", "1: a failure shows a traceback."]
    return "\n".join([*lines, *_see_also("kvfuse.conf(5)", "mount.kvfuse(8)", "fuse(8)")]) + "\n"


def make_conf_page() -> str:
    """kvfuse.conf(5): the keys of mount.conf."""
    lines = [*_head("kvfuse.conf", 5, "options of a kvfuse mount (mount.conf)"), ".SH DESCRIPTION"]
    template = resources.files("kvfuse").joinpath("data", "mount.conf").read_text("utf-8")
    note: list[str] = []
    was_key = False
    for line in template.splitlines():
        key = _KEY.match(line)
        if line.startswith("["):
            lines += [*_note(note), f'.SH "{escape(line)}"']
        elif key is not None and not line.startswith("#  "):
            lines.append(f"{'.TQ' if was_key else '.TP'}\n.B {escape(line.removeprefix('# '))}")
            was_key = True
            continue
        elif line.strip("# "):
            if was_key:
                lines += _body(note)
            note.append(line.removeprefix("#").removeprefix(" "))
            was_key = False
            continue
        lines += _body(note) if was_key else _note(note)
        was_key = False
    lines += _body(note) if was_key else _note(note)
    return "\n".join([*lines, *_see_also("kvfuse(1)", "mount.kvfuse(8)")]) + "\n"


def _note(note: list[str]) -> Iterator[str]:
    """A paragraph; what is indented keeps its lines."""
    if note:
        is_example = any(line.startswith("    ") for line in note)
        yield (".PP\n.nf\n" if is_example else ".PP\n") + escape("\n".join(note)) + ("\n.fi" if is_example else "")
    note.clear()


def _body(note: list[str]) -> Iterator[str]:
    """The text of a key, which stands before it in mount.conf."""
    if note:
        yield escape("\n".join(line.strip() for line in note))
    note.clear()


def make_mount_page() -> str:
    """mount.kvfuse(8): the words of -o."""
    lines = [*_head("mount.kvfuse", 8, "mount a kvfuse volume"), ".SH SYNOPSIS"]
    lines += ['.B "mount \\-t kvfuse"', "SOURCE MOUNTPOINT", "[\\fB\\-o\\fR WORD[,WORD...]]", ".SH DESCRIPTION"]
    lines.append(
        "SOURCE is a volume's folder or a mount.conf, see kvfuse.conf(5). mount(8), fstab(5) and systemd call\n"
        "this helper; it calls kvfuse mount, see kvfuse(1)."
    )
    lines.append(".SH OPTIONS\nWords of mount(8) that are for it or for systemd are taken as they are. Others:")
    lines += [
        f".TP\n.B {escape(word)}\n{escape(f'{key} = {str(value).lower()}')}"
        for word, (key, value) in config.flag_words()
    ]
    for name, key in sorted(config.NAMES.items()):
        if name != key:
            lines.append(f".TP\n.B {escape(name)}=VALUE\n{escape(key)}: {escape(config.expectation(key))}.")
    lines.append(".PP\nEach key of kvfuse.conf(5) is also a word by its whole name, such as records.deadline=2.")
    lines.append(".SH EXIT STATUS\n0: mounted. 1: a wrong call. 32: the mount failed.")
    return "\n".join([*lines, *_see_also("kvfuse(1)", "kvfuse.conf(5)", "mount(8)", "fstab(5)")]) + "\n"


def _see_also(*pages: str) -> Iterator[str]:
    yield ".SH SEE ALSO\n" + ",\n".join(re.sub(r"(.+)(\(\d\))", r".BR \1 \2", page) for page in pages).replace(
        ",", " ,"
    )


# -- completion ---------------------------------------------------------------------------------------


def make_completion(shell: str) -> str:
    """The script by which ``shell`` asks kvfuse for completions. Failure where Click cannot make it."""
    environment = {**os.environ, "_KVFUSE_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "import kvfuse.cli; kvfuse.cli.main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        raise Failure(f"there is no completion for {shell}: {done.stderr.strip() or 'nothing was printed'}")
    return done.stdout


FILES: dict[str, Callable[[], str]] = {
    "man/man1/kvfuse.1": make_kvfuse_page,
    "man/man5/kvfuse.conf.5": make_conf_page,
    "man/man8/mount.kvfuse.8": make_mount_page,
    **{file: partial(make_completion, shell) for shell, file in COMPLETIONS.items()},
}
"""file below the folder -> its content"""
