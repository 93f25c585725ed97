"""Tokens that are kept on disk: the samples and counts of the files, after kills, damage and changes, too."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from data import cache as data_cache
from data import chat
from data.cache import TokenCache
from data.chat import read_chat
from data.files import DataError
from data.samples import samples_of
from data.text import read_text
from data.workers import Workers
from tests.lib.tiny import TEXT, tiny_tokenizer
from tests.unit.data.chats import GOOD, conversation, templated, write

Lines = list[str]


def reader(directory: Path, said: Lines) -> TokenCache:
    return TokenCache(directory, lambda text, any_rank: said.append(text))


def chats(path: Path, rng: random.Random, count: int = 30) -> Path:
    return write(path, *({"messages": conversation(rng), "id": number} for number in range(count)))


TOKENIZER = tiny_tokenizer()


def read(path: Path, cache: TokenCache | None = None) -> tuple[str, str, Lines]:
    """Digest, summary and notes of a file of chats."""
    samples, counts = read_chat([path], TOKENIZER, max_length=300, cache=cache)
    return samples_of([*samples]).key, counts.summary(), [*counts.notes()]


def folders(directory: Path) -> list[Path]:
    """List the folders that look whole."""
    return [path for path in directory.iterdir() if path.is_dir() and len(path.name) == 32]


def in_child(action: Callable[[], object]) -> int:
    """Run in a process of its own; return its status."""
    if not (child := os.fork()):
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def killed_at(place: int) -> Callable[[FrameType, str, Any], Any]:
    """Trace that kills this process at a line of data/cache.py, counted as they run, or at a line that writes."""
    left = place

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("data/cache.py", "data/chat.py")):
            return None
        if frame.f_code.co_filename.endswith("data/chat.py") and frame.f_code.co_name != "_write":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def check_kills(tmp_path: Path, rng: random.Random, places: list[int]) -> int:
    """Kill a process at each place; return how many were killed."""
    path, kills = chats(tmp_path / "a.jsonl", rng), 0
    expected, again = read(path), tmp_path / "again"
    read(path, reader(again, []))
    (whole,) = folders(again)
    for place in places:
        directory, said = tmp_path / f"at_{place}", Lines()
        if place % 2:  # a damaged folder is replaced
            shutil.copytree(again, directory)
            (directory / whole.name / "inputs").write_bytes(b"")
        read_by_child = in_child(
            lambda place=place, to=directory: (sys.settrace(killed_at(place)), read(path, reader(to, [])))
        )
        _, status = os.waitpid(read_by_child, 0)
        kills += status == signal.SIGKILL
        left = folders(directory) if directory.exists() else []
        assert read(path, reader(directory, said)) == expected, place
        assert len(said) <= 1 and (not left or place % 2 or not said), (place, said)
        assert read(path, reader(directory, said)) == expected and len(said) <= 1, place
        shutil.rmtree(directory)
    return kills


def test_a_kill_leaves_nothing_that_looks_whole(tmp_path, rng):
    assert check_kills(tmp_path, rng, rng.sample(range(20, 220), 6)) > 2


@pytest.mark.full
def test_many_kills_leave_nothing_that_looks_whole(tmp_path, rng):
    assert check_kills(tmp_path, rng, list(range(1, 740, 8))) >= 60


def test_jobs_that_need_one_file_tokenize_it_once(tmp_path, rng):
    path, directory = chats(tmp_path / "a.jsonl", rng, 200), tmp_path / "cache"
    expected = read(path)

    def job(number: int) -> None:
        said = Lines()
        found = read(path, reader(directory, said))
        (tmp_path / f"{number}.json").write_text(json.dumps([found, said]))

    children = [in_child(lambda number=number: job(number)) for number in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(4)]
    assert [tuple(one) for one, _ in found] == [expected] * 4
    assert sum("is tokenized into" in line for _, said in found for line in said) == 1


def test_damage_is_found_and_the_file_tokenized_again(tmp_path, rng, monkeypatch):
    """Any file may have other bytes, be shorter, longer or missing, also if its checksum was checked before."""
    path, directory, said = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache", Lines()
    monkeypatch.setattr("data.cache._SETTLED", 10**8)
    expected = read(path, reader(directory, said))
    (folder,) = folders(directory)
    time.sleep(0.2)  # until its times are old enough to be remembered
    for number, file in enumerate([*sorted(folder.iterdir())] * 2):
        said.clear()
        assert read(path, reader(directory, said)) == expected and not said
        content = bytearray(file.read_bytes())
        if number % 4 == 0:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif number % 4 == 1:
            content = content[: rng.randrange(len(content))]
        elif number % 4 == 2:
            content += bytes(rng.randint(1, 9))
        file.write_bytes(content) if number % 4 < 3 else file.unlink()
        assert read(path, reader(directory, said)) == expected
        (line,) = said
        assert f"{file} " in line and f"so it is damaged: {path} is tokenized again" in line
    for known in (directory / "known").iterdir():  # is only faster
        known.write_bytes(rng.randbytes(30))
    assert read(path, reader(directory, said)) == expected and len(said) == 1


def test_a_start_after_the_build_digests_no_tokens(tmp_path, rng, monkeypatch):
    """Nor reads a data file, to find its tokens."""
    path, text, directory = chats(tmp_path / "a.jsonl", rng), tmp_path / "a.txt", tmp_path / "cache"
    text.write_text(TEXT * 9 + "<|endoftext|>")
    monkeypatch.setattr("data.cache._SETTLED", 0)

    def start() -> list[str]:
        kept = reader(directory, [])
        samples = read_chat([path], TOKENIZER, max_length=300, cache=kept)[0]
        blocks = read_text([text], TOKENIZER, 16, cache=kept)
        assert blocks.spelled == 1
        return [one.key for one in (samples, blocks, samples + blocks)]

    first, digested, digest_of = start(), list[Path](), data_cache._digest_of
    monkeypatch.setattr("data.cache._digest_of", lambda path: digested.append(path) or digest_of(path))
    monkeypatch.setattr("data.samples.Flat.between", None)
    for folder in folders(directory):
        os.utime(folder, (0, 0))
    assert start() == first and digested and not [path for path in digested if path.is_relative_to(tmp_path)]
    assert all(folder.stat().st_mtime > time.time() - 60 for folder in folders(directory))  # it was used


def test_another_content_is_tokenized_and_another_name_is_not(tmp_path, rng, monkeypatch):
    path, directory, said = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache", Lines()
    monkeypatch.setattr("data.cache._SETTLED", 10**8)
    expected = read(path, reader(directory, said))
    time.sleep(0.2)
    assert read(path, reader(directory, said)) == expected
    path.touch()
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    samples, counts = read_chat([tmp_path / "b.jsonl"], tiny_tokenizer(), max_length=300, cache=reader(directory, said))
    assert len(said) == 1 and samples[0].where() == f"{tmp_path}/b.jsonl:1"
    assert all(f"{tmp_path}/b.jsonl: " in note for note in counts.notes())
    assert read(path, reader(directory, said)) == expected and len(said) == 1
    (directory / f"killed.{socket.gethostname()}.partial").mkdir()
    times = path.stat()
    content = path.read_text().replace("assistant", "user", 1).replace("user", "assistant", 1)
    path.write_text(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and age
    assert read(path, reader(directory, said)) == read(path) and len(said) == 2
    assert not [*directory.glob("*.partial")]


@pytest.mark.parametrize("change", ["append", "replace", "touch", "remove"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, rng, monkeypatch, change):
    """And its tokens never have the name of whole ones, at which a kill could leave them."""
    path, directory = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache"

    def changed(*arguments: Any) -> dict[str, Any]:
        facts = written(*arguments)
        if change == "append":
            with path.open("a") as file:
                file.write(json.dumps(GOOD) + "\n")
        elif change == "replace":
            (tmp_path / "b").write_bytes(path.read_bytes())
            os.replace(tmp_path / "b", path)
        else:
            path.touch() if change == "touch" else path.unlink()
        return facts

    written = chat._write
    monkeypatch.setattr(chat, "_write", changed)
    monkeypatch.setattr(os, "rename", None)
    with pytest.raises((DataError, FileNotFoundError), match=r"a\.jsonl(: changed while it was tokenized|'$)"):
        read(path, reader(directory, []))
    assert not folders(directory) and not [*directory.glob("*.partial")]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_disk_whose_clock_is_another_shows_changes_too(tmp_path, rng, monkeypatch, hours):
    path, directory, said = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache", Lines()
    now, text = time.time_ns, path.read_text()
    monkeypatch.setattr(time, "time_ns", lambda: now() + hours * 3600 * 10**9)
    for change in (text, "\n".join(reversed(text.split("\n"))), text):
        path.write_text(change)
        assert read(path, reader(directory, said)) == read(path)
    assert len(said) == 2


def test_machines_with_locks_of_their_own_write_whole_folders(tmp_path, rng, monkeypatch):
    """As on a network disk whose locks are not those of other machines."""
    path, directory, said = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache", Lines()
    expected, written = read(path), chat._write

    def meanwhile(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(chat, "_write", written)
        monkeypatch.setattr(socket, "gethostname", lambda: "other")
        assert read(path, reader(directory, said)) == expected
        monkeypatch.undo()
        return written(*arguments)

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr(chat, "_write", meanwhile)
    assert read(path, reader(directory, said)) == expected == read(path, reader(directory, said))
    assert len(folders(directory)) == 1 and len(said) == 2


def test_a_directory_that_cannot_be_written(tmp_path, rng, monkeypatch):
    """Its tokens are read, of which nothing is remembered; those of other files are not made."""
    path, other, directory, said = chats(tmp_path / "a.jsonl", rng), tmp_path / "b.jsonl", tmp_path / "cache", Lines()
    expected = read(path, reader(directory, []))
    other.write_text(path.read_text() * 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("os.replace", "os.utime", "os.rename", "fcntl.flock"):
        monkeypatch.setattr(name, refuse)
    shutil.rmtree(directory / "known")
    assert read(path, reader(directory, said)) == expected and not said
    with pytest.raises(DataError, match=r"no tokens of .*b\.jsonl yet, and cannot be written and locked \(Read-only"):
        read(other, reader(directory, said))


def test_bad_lines_and_errors_are_those_of_the_file(tmp_path, rng, monkeypatch):
    """Also from the cache: else each rank would read the whole file, one after the other."""
    path, directory = write(tmp_path / "a.jsonl", GOOD, "{", GOOD, {"input": "a"}), tmp_path / "cache"
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT.encode() + b"\n\xff")
    errors = []
    for cache in (None, reader(directory, []), reader(directory, [])):
        for action in (partial(read, path), partial(read_text, [text], tiny_tokenizer(), 8)):
            with pytest.raises(DataError) as caught:
                action(cache=cache)
            errors.append(str(caught.value))
        monkeypatch.setattr(chat._Builder, "__call__", None if cache else chat._Builder.__call__)
    assert not folders(directory)  # another start reads the files again
    assert errors[:2] * 3 == errors and "a.jsonl:2: " in errors[0] and "a.jsonl:4: " in errors[0]


def test_a_template_that_writes_the_day_is_rendered_again_on_another(tmp_path, monkeypatch):
    path, directory = write(tmp_path / "a.jsonl", GOOD), tmp_path / "cache"
    plain = str(tiny_tokenizer().chat_template)
    tokenizer = templated("{{ strftime_now('%d %b %Y') }}\n" + plain)
    found = []
    for day in (1, 1, 2):
        monkeypatch.setattr("data.cache._now", lambda form, day=day: f"{day} {form}")
        said = Lines()
        read_chat([path], tokenizer, max_length=100, cache=reader(directory, said))
        found.append(len(said))
    assert found == [1, 0, 1]
    for form in ("{{ strftime_now(form) }}\n", "{% set now = strftime_now %}{{ now('%H') }}\n"):
        with pytest.raises(DataError, match=r"data\.cache: the chat template of .* writes the time"):
            read_chat([path], templated(form + plain), max_length=9, cache=reader(directory, []))


def test_another_tokenizer_gives_other_tokens(tmp_path, rng):
    """In every part: each change is read as without a cache, from a directory that has the tokens of all others."""
    path, text, directory = chats(tmp_path / "a.jsonl", rng, 8), tmp_path / "a.txt", tmp_path / "cache"
    text.write_text(TEXT * 3)
    changed = [tiny_tokenizer() for _ in range(8)]
    changed[1].chat_template = str(changed[1].chat_template).replace("'\n'", "'\n\n'")
    changed[2].eos_token = "<|endoftext|>"
    changed[3].add_special_tokens({"additional_special_tokens": ["quick"]})
    changed[4].add_tokens(["brown"])
    for number, stops in ((5, [1]), (6, [1, 2]), (7, [1])):  # at which serving stops
        changed[number].eos_token = "<|im_start|>"
        changed[number].name_or_path = str(tmp_path / f"model_{number}")
        (tmp_path / f"model_{number}").mkdir()
        (tmp_path / f"model_{number}" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    digests, unstopped, said = set(), [], Lines()
    for tokenizer in changed:
        options = {"max_length": 300, "loss_on": "all", "cache": reader(directory, said)}
        samples, counts = read_chat([path], tokenizer, **options)
        expected, others = read_chat([path], tokenizer, **{**options, "cache": None})
        assert samples_of([*samples]).key == samples_of([*expected]).key and counts == others
        blocks = [
            read_text([text, text.with_suffix(".txt")], tokenizer, 16, cache=cache)
            for cache in (options["cache"], None)
        ]
        assert samples_of([*blocks[0]]).key == samples_of([*blocks[1]]).key
        digests.add(samples_of(samples).key)
        unstopped.append(counts.unstopped > 0)
    assert len(digests) >= 3 and unstopped[5:] == [True, False, True]
    assert len([line for line in said if "a.jsonl is tokenized" in line]) == 7  # the last one is another's copy


@pytest.mark.full  # each process imports transformers
def test_several_processes_give_what_one_gives(tmp_path, rng, monkeypatch):
    """In the order of the lines; a process that is killed is an error that says so."""
    path, said = chats(tmp_path / "a.jsonl", rng, 300), Lines()
    expected = read(path)
    monkeypatch.setattr(chat, "_BYTES_PER_PROCESS", path.stat().st_size // 2)
    monkeypatch.setattr("data.tokens.TEXTS_AT_ONCE", 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert read(path, reader(tmp_path / "cache", said)) == expected and len(said) == 1
    with Workers(_Killed, 2) as workers, pytest.raises(OSError, match="ended with exit code -9, expected it to finish"):
        [*workers.in_order(range(9))]


class _Killed:
    def __call__(self, task: int) -> int:
        if task == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return task


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, rng):
    """And nothing of the file is left."""
    path, directory = chats(tmp_path / "a.jsonl", rng), tmp_path / "cache"

    def full(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises(OSError) as caught:
            read(path, reader(directory, []))
        assert caught.value.errno == errno.EFBIG and str(directory) in caught.value.filename

    for size in (0, 100, 2000):
        assert os.waitpid(in_child(partial(full, size)), 0)[1] == 0
        assert not folders(directory) and not [*directory.glob("*.partial")]
    assert read(path, reader(directory, [])) == read(path)
