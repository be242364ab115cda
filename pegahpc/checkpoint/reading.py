"""Reading a checkpoint: several threads, each a chunk at a time, in the order in which the bytes lie on disk.

What is read passes through a chunk's buffer into its place: a load holds the model once, and a chunk a thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from pegahpc.checkpoint.files import CheckpointError, TensorInfo, faults

CHUNK_BYTES = 16 << 20
MAX_THREADS = 4  # enough to keep a disk busy while chunks are converted
MOST_FAULTS = 10  # then the rest is not read
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I32": torch.int32,
    "U8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Consecutive rows of a stored tensor: all of it, or a rank's slice of a stack."""

    name: str
    info: TensorInfo
    first_row: int
    num_rows: int

    @property
    def row_bytes(self) -> int:
        """Of one step along the first dimension."""
        return torch.Size(self.info.shape[1:]).numel() * DTYPES[self.info.dtype].itemsize


Put = Callable[[int, list[torch.Tensor]], None]


@dataclass(eq=False)
class Group:
    """Jobs whose weights belong together: when the last of them is done, `then` is called in a reading thread."""

    then: Callable[[], None]
    num_left: int = 0  # chunks that are not in their place


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix or vector: what is read together, and what is done with it.

    `put` gets the number of the first row and those rows of each source, in buffers that are used again afterwards. It
    raises CheckpointError for values that no model may have.
    """

    sources: tuple[Source, ...]  # the tensor, or codes and scales
    put: Put
    group: Group
    rows_a_scale: int = 1  # rows of the first source that share a row of the second
    granularity: int = 1  # chunks start at multiples of so many rows


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    job: Job
    first_row: int
    num_rows: int

    def parts(self) -> Iterator[tuple[Source, int, int]]:
        """Of each source: the first row of the chunk, and how many."""
        first, rows = self.job.sources[0], self.job.rows_a_scale
        yield first, self.first_row, self.num_rows
        for source in self.job.sources[1:]:
            begin, end = self.first_row // rows, -(-(self.first_row + self.num_rows) // rows)
            yield source, begin, end - begin

    @property
    def place(self) -> tuple[Path, int]:
        source = self.job.sources[0]
        return source.info.file, source.info.offset + (source.first_row + self.first_row) * source.row_bytes

    @property
    def num_bytes(self) -> int:
        return sum(source.row_bytes * num_rows for source, _, num_rows in self.parts())


def read_all(jobs: list[Job], progress: Callable[[float], None]) -> None:
    """Carry out all jobs.

    Args:
        jobs: emptied at once: a job, and the memory that it fills, is let go when it is done.
        progress: called in this thread with the share of bytes read so far, rising to 1.

    Raises:
        CheckpointError: a file that ends early or cannot be read, or what a job found; several faults together.
    """
    chunks = deque(sorted((chunk for job in jobs for chunk in _chunks(job)), key=lambda chunk: chunk.place))
    jobs.clear()
    total = sum(chunk.num_bytes for chunk in chunks)
    num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), len(chunks)))
    with ExitStack() as stack:
        reader = _Reader(chunks, stack)
        threads = [threading.Thread(target=reader.run, name=f"load-{n}", daemon=True) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            _follow(reader, num_threads, total, progress)
        finally:
            reader.stop.set()
            for thread in threads:
                thread.join()


def trim_heap() -> None:
    """Give freed memory back to the system, which glibc keeps for later: a third of a large load's peak on the CPU."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _follow(reader: _Reader, num_threads: int, total: int, progress: Callable[[float], None]) -> None:
    done, told, found = 0, 0.0, []
    while num_threads:
        event = reader.events.get()
        if event is None:
            num_threads -= 1
        elif isinstance(event, int):
            done += event
            if done == total or done / total - told >= 0.005:  # each word costs its hearer something
                told = done / total
                progress(told)
        elif isinstance(event, CheckpointError):
            found += str(event).splitlines()
            if len(found) >= MOST_FAULTS:
                reader.stop.set()
        else:
            raise event
    if found:
        raise faults(sorted(found), most=MOST_FAULTS)


class _Reader:
    """What the threads share: the chunks that are left, the open files, and a queue for what happens."""

    def __init__(self, chunks: deque[_Chunk], stack: ExitStack) -> None:
        self.events: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.stop = threading.Event()
        self._chunks = chunks
        self._lock = threading.Lock()
        self._num_threads = torch.get_num_threads()
        files = {source.info.file for chunk in chunks for source in chunk.job.sources}
        self._files = {file: _open(file, stack) for file in sorted(files)}
        for chunk in chunks:
            chunk.job.group.num_left += 1

    def run(self) -> None:
        """A thread's life: chunk after chunk, then None. Faults of the checkpoint do not end it, others do."""
        torch.set_num_threads(self._num_threads)  # a thread of its own starts with the library's default
        buffers: list[torch.Tensor] = []
        try:
            while not self.stop.is_set() and (chunk := self._next()) is not None:
                try:
                    self._read(chunk, buffers)
                    self._finish(chunk.job.group)
                except CheckpointError as error:
                    self.events.put(error)
                self.events.put(chunk.num_bytes)
                del chunk  # or its memory would wait for the next one
        except BaseException as error:  # told to the thread that waits, which raises it
            self.events.put(error)
        finally:
            self.events.put(None)

    def _next(self) -> _Chunk | None:
        with self._lock:
            return self._chunks.popleft() if self._chunks else None

    def _finish(self, group: Group) -> None:
        with self._lock:
            group.num_left -= 1
            is_last = not group.num_left
        if is_last:
            group.then()

    def _read(self, chunk: _Chunk, buffers: list[torch.Tensor]) -> None:
        tensors: list[torch.Tensor] = []
        for index, (source, first_row, num_rows) in enumerate(chunk.parts()):
            size = num_rows * source.row_bytes
            if index == len(buffers):
                buffers.append(torch.empty(0, dtype=torch.uint8))
            if buffers[index].numel() < size:
                buffers[index] = torch.empty(size, dtype=torch.uint8)
            buffer = buffers[index][:size]
            offset = source.info.offset + (source.first_row + first_row) * source.row_bytes
            _read_at(self._files[source.info.file], source.info.file, buffer, offset)
            tensors.append(buffer.view(DTYPES[source.info.dtype]).view(num_rows, *source.info.shape[1:]))
        chunk.job.put(chunk.first_row, tensors)


def _chunks(job: Job) -> Iterator[_Chunk]:
    source = job.sources[0]
    rows = max(1, CHUNK_BYTES // max(source.row_bytes, 1) // job.granularity) * job.granularity
    for first_row in range(0, source.num_rows, rows):
        yield _Chunk(job=job, first_row=first_row, num_rows=min(rows, source.num_rows - first_row))


def _open(file: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    stack.callback(os.close, descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor


def _read_at(descriptor: int, file: Path, buffer: torch.Tensor, offset: int) -> None:
    view, done = memoryview(buffer.numpy().data), 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read at byte {offset + done} ({error.strerror})") from None
        if not count:
            raise CheckpointError(f"{file}: ends at byte {offset + done}, before its header says; is the file whole?")
        done += count
