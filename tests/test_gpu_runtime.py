"""The CUDA forward at run time: streams, threads, processes, forks, memory, the cache, graphs."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import assert_same, bits, check, fill_nan, inputs, lengths
from producers import OldProducer, Producer

from cufa2 import FlashAttention2, compiler, device, flash_attention, launch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent


def opts(**options: Any) -> dict[str, Any]:
    return options


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Streams


def late_copy(cp: Any, target: Any, source: Any, milliseconds: float) -> None:
    """On CuPy's current stream: work for a while, then fill `target`."""
    oracle.spin(milliseconds)
    bits(target)[...] = bits(source)


def prepared(dtype: str = "bfloat16") -> tuple[Any, Any, Any, Any]:
    """q, k, v and o; everything is compiled and loaded, and the card is idle."""
    import cupy

    q, k, v = inputs(2, 150, 200, 4, 2, 64, 64, dtype)
    o, lse = flash_attention(q, k, v, return_lse=True)
    check(o, lse, q, k, v, "warm-up")
    oracle.spin(0)
    bits(oracle.copy(q))[...] = bits(q)
    cupy.cuda.Device().synchronize()
    return q, k, v, o


def test_call_does_not_wait_for_the_card(cp: Any) -> None:
    q, k, v, o = prepared()
    out = oracle.copy(o)
    for stream in (cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.ptds):
        fill_nan(out)
        cp.cuda.Device().synchronize()
        late_q = oracle.copy(q)
        fill_nan(late_q)
        cp.cuda.Device().synchronize()
        with stream:
            late_copy(cp, late_q, q, 200)
            took = seconds(lambda late_q=late_q: flash_attention(late_q, k, v, out=out))  # type: ignore[misc]
            assert not stream.done, f"{stream}: the call waited for the card"
        assert took < 0.1, f"{stream}: the call took {took:.3f} s behind a kernel of 0.2 s"
        stream.synchronize()
        assert_same(out, o, f"{stream}: queued behind the write of q")


def test_case_13_late_producer_on_a_side_stream(cp: Any) -> None:
    q, k, v, o = prepared()
    side = cp.cuda.Stream(non_blocking=True)
    late_q = oracle.copy(q)

    def order(stream: Any) -> None:
        """What a DLPack producer does: the consumer's stream waits for mine."""
        pointer = 0 if stream == 1 else stream
        event = side.record()  # must outlive the call below, which takes its address alone
        cp.cuda.runtime.streamWaitEvent(pointer, event.ptr)

    for stream in (cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.ptds):
        for kind in (Producer, OldProducer):
            fill_nan(late_q)
            cp.cuda.Device().synchronize()
            with side:
                late_copy(cp, late_q, q, 100)
            producer = kind(late_q, on_export=order)
            with stream:
                start = time.perf_counter()
                result = flash_attention(producer, k, v)
                took = time.perf_counter() - start
                waited = side.done
            assert not waited, f"{stream}: the call took {took:.3f} s and waited for the producer"
            stream.synchronize()
            assert_same(result, o, f"{stream}, {kind.__name__}: the late write was not seen")


class StreamProtocol:
    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def test_stream_argument(cp: Any) -> None:
    q, k, v, o = prepared()
    stream = cp.cuda.Stream(non_blocking=True)
    late_q = oracle.copy(q)
    for spelled in (stream, stream.ptr, StreamProtocol(stream.ptr)):
        fill_nan(late_q)
        cp.cuda.Device().synchronize()
        with stream:
            late_copy(cp, late_q, q, 50)
        result = flash_attention(late_q, k, v, stream=spelled)
        assert not stream.done, f"{spelled!r}: the call waited for its stream"
        stream.synchronize()
        assert_same(result, o, f"stream={spelled!r}")
    for spelled in (0, 1, cp.cuda.Stream.null):
        assert_same(flash_attention(q, k, v, stream=spelled), o, f"stream={spelled!r}")


def test_work_on_another_stream_follows_the_current_one(cp: Any) -> None:
    """q is still being written on CuPy's current stream, and dropped right after the call."""
    q, k, v, o = prepared()
    work, side = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    with side:
        late_q = oracle.copy(q)
        fill_nan(late_q)
        late_copy(cp, late_q, q, 50)
        with work:
            oracle.spin(0)
        result = flash_attention(late_q, k, v, stream=work)
        del late_q
        other = oracle.copy(q)  # would take the freed memory
        fill_nan(other)
    work.synchronize()
    assert_same(result, o, "the work overtook what was queued before it, or its input was reused")


def test_torch_stream_argument(cp: Any, torch: Any) -> None:
    q, k, v, o = prepared()
    side = torch.cuda.Stream()
    late_q = oracle.copy(q)
    source = torch.from_dlpack(bits(q).view(np.int16))
    target = torch.from_dlpack(bits(late_q).view(np.int16))
    with torch.cuda.stream(side):
        target.copy_(source)
    for spelled in (side, side.cuda_stream):
        fill_nan(late_q)
        cp.cuda.Device().synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            target.copy_(source)
        result = flash_attention(late_q, k, v, stream=spelled)
        assert not side.query(), f"{spelled}: the call waited for its stream"
        side.synchronize()
        assert_same(result, o, f"stream={spelled}")


def test_current_device_and_stream_stay(cp: Any) -> None:
    q, k, v, _ = prepared()
    other = cp.cuda.Stream(non_blocking=True)
    for current in (cp.cuda.Stream.null, cp.cuda.Stream(), cp.cuda.Stream.ptds):
        with current:
            flash_attention(q, k, v)
            flash_attention(q, k, v, stream=other)
            flash_attention(Producer(q), k, v)
            with pytest.raises(ValueError, match="head dim"):
                flash_attention(q, k[..., :32], v)
            assert cp.cuda.get_current_stream() == current, f"{current} was replaced"
            assert cp.cuda.runtime.getDevice() == 0
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null


# Threads


THREAD_WORK: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (128, "bfloat16", opts(causal=True)),
    (64, "float16", opts()),
    (128, "float16", opts(window=(30, 10))),
    (66, "bfloat16", opts(causal=True)),  # through work buffers
    (256, "bfloat16", opts()),
    (64, "bfloat16", opts(softcap=3.0)),
    (66, "float16", opts(window=(20, None))),
    (128, "bfloat16", opts(causal="top_left", softmax_scale=-0.1)),
)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0..count-1) in threads that start together; raise the first error."""
    barrier, errors = threading.Barrier(count), []

    def body(n: int) -> None:
        try:
            barrier.wait(30)
            work(n)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("streams", ["own", "shared", "per-thread default"])
def test_case_17_threads(cp: Any, monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    data, expected = [], []
    for n, (dim, dtype, options) in enumerate(THREAD_WORK):
        arrays_ = [
            inputs(2, 200 + n, 1000, 4, 2, dim, dim, dtype, seed) for seed in (2 * n, 2 * n + 1)
        ]
        data.append(arrays_)
        expected.append([flash_attention(q, k, v, **options) for q, k, v in arrays_])
    cp.cuda.Device().synchronize()
    monkeypatch.setattr(launch, "_loaded", {})  # the threads load the modules, all at once
    monkeypatch.setattr(launch, "_loading", {})
    shared = cp.cuda.Stream(non_blocking=True)

    def work(n: int) -> None:
        own = cp.cuda.Stream(non_blocking=True)
        stream = {"own": own, "shared": shared}.get(streams, cp.cuda.Stream.ptds)
        order = np.random.default_rng(n).permutation(50)
        kept = []  # CuPy's pool is not asked to tell the threads' default streams apart
        with stream:
            for i in order:
                job = (n + i // 10) % len(THREAD_WORK)
                options, (q, k, v) = THREAD_WORK[job][2], data[job][i % 2]
                results = flash_attention(q, k, v, **options)
                kept.append(results)
                if i % 5 == 0:
                    stream.synchronize()
                    what = f"thread {n}, call {i}, {THREAD_WORK[job]}"
                    assert_same(results, expected[job][i % 2], what)
            assert cp.cuda.get_current_stream() == stream, "the thread's stream was replaced"
        stream.synchronize()

    in_threads(8, work)


@pytest.mark.parametrize("streams", ["shared", "per-thread default"])
def test_threads_do_not_share_work_buffers(cp: Any, streams: str) -> None:
    """Misaligned inputs of different values, the work of all threads in flight at once."""
    count, rounds = 6, 12
    data = [inputs(1, 300, 4000, 4, 4, 66, 66, "bfloat16", n) for n in range(count)]
    expected = [flash_attention(q, k, v) for q, k, v in data]
    cp.cuda.Device().synchronize()
    shared = cp.cuda.Stream(non_blocking=True)

    def work(n: int) -> None:
        stream = shared if streams == "shared" else cp.cuda.Stream.ptds
        q, k, v = data[n]
        with stream:
            results = [flash_attention(q, k, v) for _ in range(rounds)]
            stream.synchronize()
            for i, x in enumerate(results):
                assert_same(x, expected[n], f"thread {n}, round {i}, {streams} stream")

    in_threads(count, work)


# Processes


def child(code: str, **environment: str) -> subprocess.Popen[str]:
    """A Python child that runs `code` from the repository's root."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str], timeout: float = 120) -> str:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError(f"the child hangs after {timeout} s") from None
    assert process.returncode == 0, f"the child failed with {process.returncode}:\n{out}\n{err}"
    return out


# Inputs without a kernel of CuPy's own: only copies, so that nothing but the library compiles.
CHILD_RUN = """
import hashlib
import cupy
import numpy as np
import cufa2
from cufa2.testing import make_inputs

def attend(dtype="bfloat16", causal=True):
    arrays = make_inputs((2, 150, 200, 4, 2, 64, 64), dtype)[:3]
    on_card = [cupy.asarray(x.view(np.uint16)).view(x.dtype) for x in arrays]
    o = cufa2.flash_attention(*on_card, causal=causal)
    return hashlib.sha256(o.view(np.uint16).get().tobytes()).hexdigest()
"""


def child_digest(cp: Any, **options: Any) -> str:
    """What CHILD_RUN's attend() prints, from this process."""
    space: dict[str, Any] = {}
    exec(CHILD_RUN, space)
    return str(space["attend"](**options))


def test_case_16_processes_share_an_empty_cache(cp: Any, tmp_path: Path) -> None:
    expected = child_digest(cp)
    for round_ in ("empty", "filled", "cut in half"):
        if round_ == "cut in half":
            for file in tmp_path.iterdir():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        pair = [
            child(CHILD_RUN + "\nprint(attend())", CUFA2_CACHE_DIR=str(tmp_path)) for _ in "ab"
        ]
        for process in pair:
            assert output_of(process).split() == [expected], f"{round_} cache"
        names = sorted(file.suffix for file in tmp_path.iterdir())
        kept = [n for n in names if n != ".checked"]  # see selfcheck.py
        assert kept == [".cubin", ".json"], f"{round_} cache: it holds {names}"


def test_case_16_unwritable_cache_costs_time_only(cp: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    process = child(
        CHILD_RUN + "\nprint(attend())", CUFA2_CACHE_DIR=str(tmp_path / "file" / "cache")
    )
    assert output_of(process).split() == [child_digest(cp)]


def test_ahead_of_time_folder_needs_no_nvrtc(cp: Any, tmp_path: Path) -> None:
    options = "--head-dim 64 --dtype bfloat16 --mask causal --score plain"
    command = [sys.executable, "-m", "cufa2", "compile", "--arch", device.info(0).arch]
    subprocess.run(
        [*command, *options.split(), "-o", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUFA2_CACHE_DIR": str(tmp_path / "none")},
        check=True,
        capture_output=True,
        timeout=120,
    )
    process = child(
        CHILD_RUN
        + """
class Hidden:
    def __getattr__(self, name):
        raise RuntimeError("libnvrtc.so cannot be found")

def nvrtc_mapped():
    with open("/proc/self/maps") as f:
        return "libnvrtc" in f.read()

before = nvrtc_mapped()
cupy.cuda.nvrtc = Hidden()
print(attend())
assert nvrtc_mapped() == before, "NVRTC was loaded for a kernel that is in the cache"
try:
    attend(causal=False)
except cufa2.CompileError as e:
    assert "cufa2[cuda" in str(e), str(e)
else:
    raise AssertionError("a kernel that is not in the folder was found")
print(attend())
""",
        CUFA2_CACHE_DIR=str(tmp_path),
    )
    assert output_of(process).split() == [child_digest(cp)] * 2


FORK = """
import os

def in_fork(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the forked child failed"
"""


def test_case_20_fork_after_import(cp: Any) -> None:
    code = f"""
import cufa2
{FORK}
def work():
    space = {{}}
    exec('''{CHILD_RUN}''', space)
    print(space["attend"](), flush=True)

in_fork(work)
in_fork(work)
work()
"""
    assert output_of(child(code)).split() == [child_digest(cp)] * 3


def test_case_20_fork_after_use(cp: Any) -> None:
    code = f"""
{CHILD_RUN}
{FORK}
q, k, v, _ = make_inputs((1, 20, 20, 2, 2, 64, 64), "float16")
on_card = [cupy.asarray(x) for x in (q, k, v)]
expected = cufa2.flash_attention(q, k, v)
cufa2.flash_attention(*on_card)

def work():
    assert (cufa2.flash_attention(q, k, v) == expected).all(), "the CPU back end"
    for call in (
        lambda: cufa2.flash_attention(*on_card),
        lambda: cufa2.FlashAttention2(64, "float16", device="cuda"),
    ):
        try:
            call()
        except RuntimeError as e:
            assert "fork" in str(e) and "spawn" in str(e), repr(e)
        else:
            raise AssertionError("a forked child used its parent's CUDA context")

in_fork(work)
cufa2.flash_attention(*on_card).get()
print("done")
"""
    assert output_of(child(code), 60).split() == ["done"]


def test_case_20_visible_devices_after_import(cp: Any) -> None:
    code = """
    import os
    import cufa2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        cufa2.FlashAttention2(64, "float16", device="cuda")
    except RuntimeError as e:
        assert "CUDA_VISIBLE_DEVICES" in str(e), str(e)
        print("refused")
    """
    assert output_of(child(code)).split() == ["refused"]


# Memory


def settle(cp: Any) -> None:
    """Finish all work and let go of what waited for it."""
    cp.cuda.Device().synchronize()
    q = inputs(1, 8, 8, 1, 1, 64, 64, "float16")
    flash_attention(*q)
    del q
    gc.collect()
    cp.cuda.Device().synchronize()


def test_case_15_nothing_grows(cp: Any) -> None:
    pool = cp.get_default_memory_pool()
    q, k, v = inputs(1, 40, 50, 2, 1, 64, 64, "bfloat16")
    odd_q, odd_k, odd_v = inputs(1, 40, 50, 2, 1, 66, 66, "float16")
    lens = lengths(33)
    produced: list[int] = [0, 0]

    def one_round(n: int) -> None:
        kind = Producer if n % 2 else OldProducer
        spies = [kind(x) for x in (q, k, v)]
        flash_attention(*spies, causal=bool(n % 3), seqlens_k=lens)
        flash_attention(odd_q, odd_k, odd_v, return_lse=True)
        flash_attention(kind(q[:, :0]), k, v)
        flash_attention(q, kind(k[:, :0]), v[:, :0])
        bad = kind(k[:, :7])
        with pytest.raises(ValueError, match="rows"):
            flash_attention(q, bad, v)
        with pytest.raises(TypeError, match="one dtype"):
            flash_attention(q, odd_k, v)
        produced[0] += sum(s.exports for s in (*spies, bad))
        watched.extend((*spies, bad))

    watched: list[Producer] = []
    marks = []
    for n in range(2000):
        one_round(n)
        if n % 100 == 99:
            settle(cp)
            produced[1] += sum(s.deleted for s in watched)
            watched.clear()
            gc.collect()
            free = cp.cuda.runtime.memGetInfo()[0]
            marks.append((pool.used_bytes(), pool.total_bytes(), free, len(gc.get_objects())))
    assert produced[0] == produced[1], f"{produced[0]} exports, {produced[1]} deleter calls"
    early, late = marks[2], marks[-1]
    assert late[0] <= early[0], f"CuPy's pool holds {late[0] - early[0]} bytes more: {marks}"
    assert late[1] <= early[1], f"CuPy's pool grew by {late[1] - early[1]} bytes: {marks}"
    assert early[2] - late[2] < 8 << 20, f"the card has {early[2] - late[2]} bytes less: {marks}"
    assert late[3] - early[3] < 500, f"{late[3] - early[3]} Python objects more: {marks}"


def scratch_bytes(launcher: FlashAttention2) -> list[int]:
    return [s._buffer.nbytes for s in launcher._scratch.values() if s._buffer is not None]


def test_work_buffers_are_reused(cp: Any) -> None:
    launcher = FlashAttention2(66, "float16", device="cuda")
    sizes = []
    for sk in (500, 500, 20, 500, 1000, 300):
        q, k, v = inputs(1, 100, sk, 2, 2, 66, 66, "float16")
        o, lse = launcher.forward(q, k, v)
        check(o, lse, q, k, v, f"Sk={sk}")
        sizes.append(scratch_bytes(launcher))
    assert all(len(s) == 1 for s in sizes), f"one stream, buffers {sizes}"
    (a,), (b,), (c,), (d,), (e,), (f,) = sizes
    assert a == b == c == d < e == f, f"the buffer changed size: {sizes}"
    held = cp.get_default_memory_pool().used_bytes()
    for _ in range(20):
        launcher.forward(q, k, v)
    assert cp.get_default_memory_pool().used_bytes() == held, "a call keeps memory"
    with cp.cuda.Stream(non_blocking=True) as other:
        o, lse = launcher.forward(q, k, v)
        other.synchronize()
        check(o, lse, q, k, v, "another stream")
    assert len(scratch_bytes(launcher)) == 2, "streams must not share a work buffer"
    aligned = FlashAttention2(64, "float16", device="cuda")
    aligned.forward(*inputs(1, 100, 100, 2, 2, 64, 64, "float16"))
    assert scratch_bytes(aligned) == [], "aligned tensors need no work buffer"


def test_memory_of_a_long_call(cp: Any) -> None:
    from cupy.cuda import memory_hook

    class Peak(memory_hook.MemoryHook):  # type: ignore[misc]
        name = "Peak"
        live: dict[int, int] = {}  # noqa: RUF012
        top = 0

        def malloc_postprocess(self, **kwargs: Any) -> None:
            self.live[kwargs["mem_ptr"]] = kwargs["mem_size"]
            self.top = max(self.top, sum(self.live.values()))

        def free_postprocess(self, **kwargs: Any) -> None:
            self.live.pop(kwargs["mem_ptr"], None)

    s, h, d = 131072, 4, 128
    q, k, v = inputs(1, s, s, h, h, d, d, "bfloat16")
    flash_attention(q[:, :64], k[:, :64], v[:, :64], causal=True)
    cp.cuda.Device().synchronize()
    cp.get_default_memory_pool().free_all_blocks()
    before = cp.get_default_memory_pool().total_bytes()
    free = cp.cuda.runtime.memGetInfo()[0]
    with Peak() as peak:
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        cp.cuda.Device().synchronize()
    fair = q.nbytes + k.nbytes + v.nbytes + o.nbytes + lse.nbytes
    used = q.nbytes + k.nbytes + v.nbytes + peak.top
    assert used <= 1.01 * fair, f"the call used {used} bytes for {fair} of inputs and results"
    grown = cp.get_default_memory_pool().total_bytes() - before
    assert grown <= 1.01 * (o.nbytes + lse.nbytes), f"CuPy's pool grew by {grown} bytes"
    taken = free - cp.cuda.runtime.memGetInfo()[0]
    assert taken <= 1.01 * (o.nbytes + lse.nbytes) + (4 << 20), f"the card lost {taken} bytes"
    rows = [(0, head, i) for head in (0, 3) for i in (0, 1, 127, 65535, 65536, s - 1)]
    check(o, lse, q, k, v, f"S={s}", rows=rows, causal=True)


# The launcher class and the cache


def test_launcher_compiles_when_made(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "fwd_sm90" if device.info(0).cc == (9, 0) else "fwd_sm80"
    for spelled in ("cuda", "cuda:0", 0):
        made = FlashAttention2(128, "bfloat16", causal=True, device=spelled)
        assert [k.name for k in made.kernels] == [f"{row}_bf16_d128_causal"], made.kernels
        record = made.kernels[0]
        assert 0 < record.registers <= 255, record
        assert 48 << 10 < record.shared_memory <= device.info(0).smem_per_block, record
    lazy = FlashAttention2(128, "bfloat16", causal=True)
    assert lazy.kernels == ()
    q, k, v = inputs(1, 100, 100, 2, 2, 128, 128, "bfloat16")
    o, lse = lazy.forward(q, k, v)
    check(o, lse, q, k, v, "forward", causal=True)
    assert lazy.kernels == made.kernels
    assert_same(flash_attention(q, k, v, causal=True), o, "the function and the class")

    def compiled_again(*args: Any) -> Any:
        raise AssertionError("compiled again in spite of the cache")

    monkeypatch.setattr(compiler, "_compile", compiled_again)
    again = FlashAttention2(128, "bfloat16", causal=True, device="cuda")
    took = seconds(lambda: FlashAttention2(128, "bfloat16", causal=True, device="cuda"))
    assert took < 0.01, f"a launcher for a loaded kernel took {took:.3f} s"
    tries = []
    for _ in range(5):
        monkeypatch.setattr(launch, "_loaded", {})
        tries.append(seconds(lambda: FlashAttention2(128, "bfloat16", causal=True, device="cuda")))
    assert min(tries) < 0.05, f"loading a cached kernel took {tries} s"
    assert again.kernels == made.kernels


def test_launcher_holds_to_its_dims_and_dtype(cp: Any) -> None:
    made = FlashAttention2(64, "float16", device="cuda")
    q, k, v = inputs(1, 20, 20, 2, 2, 72, 72, "float16")
    with pytest.raises(ValueError, match=r"head dims \(64, 64\)"):
        made.forward(q, k, v)
    q, k, v = inputs(1, 20, 20, 2, 2, 64, 64, "bfloat16")
    with pytest.raises(TypeError, match="for float16"):
        made.forward(q, k, v)


# CUDA graphs


@pytest.mark.parametrize("dim", [64, 66])
def test_case_14_graph_capture(cp: Any, dim: int) -> None:
    q, k, v = inputs(2, 150, 200, 4, 2, dim, dim, "bfloat16")
    lens = lengths(200, 77)
    o, lse = oracle.empty(q.shape, "bfloat16"), oracle.empty((2, 4, 150), "float32")
    stream = cp.cuda.Stream(non_blocking=True)
    call = FlashAttention2(dim, "bfloat16", causal=True).forward
    cp.cuda.Device().synchronize()
    with stream:
        call(q, k, v, seqlens_k=lens, out=o, lse_out=lse)  # warm up: compile, load, work buffers
        stream.synchronize()
        stream.begin_capture()
        try:
            call(q, k, v, seqlens_k=lens, out=o, lse_out=lse)
        finally:
            graph = stream.end_capture()
    for seed, real in itertools.product((5, 6, 7), (200, 3)):
        for x, y in zip(
            (q, k, v), inputs(2, 150, 200, 4, 2, dim, dim, "bfloat16", seed), strict=True
        ):
            bits(x)[...] = bits(y)
        lens[1] = real
        fill_nan(o, lse)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager, eager_lse = flash_attention(q, k, v, seqlens_k=lens, causal=True, return_lse=True)
        check(o, lse, q, k, v, f"replay {seed}", seqlens_k=lens, causal=True)
        assert_same(o, eager, f"o of replay {seed}, {real} keys")
        assert_same(lse, eager_lse, f"lse of replay {seed}, {real} keys")
