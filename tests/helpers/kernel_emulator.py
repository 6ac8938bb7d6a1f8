"""Runs the fused kernels' own source on a CPU: each GPU thread is a thread, warps and blocks are barriers.

Slow and only for tests. It shows that the text shared by CUDA and Metal computes what `plain` computes; that
a GPU compiles it and agrees is for `benchmarks/gpu_draw.py`, on a GPU.
"""

import ctypes
import subprocess

import numpy as np

from toolkit.sampling import kernel_sources

_HEADER = r"""
#include <barrier>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>
#define DEVICE static inline
#define SHARED static
#define SYNC block_barrier->arrive_and_wait()
#define SHUFFLE(x, lanes) exchange(x, lanes)
#define LANE lane_
#define PLACE place_
#define ROW row_
#define UNROLL
#define LOG(x) logf(x)
#define EXP(x) expf(x)
#define MINUS_INFINITY (-std::numeric_limits<float>::infinity())
#define NOT_A_NUMBER (std::numeric_limits<float>::quiet_NaN())
typedef unsigned int word;
thread_local int lane_, place_, row_;
static std::barrier<>* block_barrier;
static std::barrier<>* warp_barriers[8];
static long exchanged[256];
template <class T> T exchange(T x, int lanes) {
  long bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  exchanged[lane_] = bits;
  warp_barriers[lane_ / 32]->arrive_and_wait();
  long other = exchanged[lane_ ^ lanes];
  warp_barriers[lane_ / 32]->arrive_and_wait();
  T y;
  std::memcpy(&y, &other, sizeof y);
  return y;
}
"""

_LAUNCH = r"""
template <class F> void launch(int threads, int places, int rows, F kernel) {
  for (int row = 0; row < rows; ++row) for (int place = 0; place < places; ++place) {
    std::barrier<> block(threads);
    block_barrier = &block;
    std::vector<std::barrier<>*> warps;
    for (int w = 0; w < 8; ++w) warps.push_back(warp_barriers[w] = new std::barrier<>(32));
    std::vector<std::thread> pool;
    for (int lane = 0; lane < threads; ++lane)
      pool.emplace_back([=] { lane_ = lane; place_ = place; row_ = row; kernel(); });
    for (auto& thread : pool) thread.join();
    for (auto* warp : warps) delete warp;
  }
}
extern "C" void run_draw(const float* logits, const float* inverse, const float* scale, const word* keys,
    float* floats, int* ids, int* tokens, float* values, int rows, int vocab, int chunks) {
  launch(256, chunks, rows, [=] { part(logits, inverse, scale, keys, floats, ids, vocab, chunks); });
  launch(32, 1, rows, [=] { join(floats, ids, inverse, tokens, values, chunks); });
}
extern "C" void run_at(const word* keys, const int* ids, word* words, int rows, int count) {
  launch(32, (count + 31) / 32, rows, [=] { at(keys, ids, words, count); });
}
"""


class Emulator:
    """The kernels as a shared library in `folder`; raises if the compiler does."""

    def __init__(self, folder):
        source = "\n".join(
            [
                _HEADER,
                kernel_sources.COMMON,
                "typedef float T;",
                "void part(const float* logits, const float* inverse, const float* scale, const word* keys,"
                " float* floats, int* ids, int VOCAB, int CHUNKS) {" + kernel_sources.PART + "}",
                "void join(const float* floats, const int* ids, const float* inverse, int* tokens,"
                " float* values, int CHUNKS) {" + kernel_sources.JOIN + "}",
                "void at(const word* keys, const int* ids, word* words, int COUNT) {"
                + kernel_sources.AT
                + "}",
                _LAUNCH,
            ]
        )
        code, library = folder / "kernels.cpp", folder / "kernels.so"
        code.write_text(source)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(code)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self._library = ctypes.CDLL(str(library))

    def draw(self, logits, inverse, scale, keys):
        """Tokens, margins, log probabilities and maxima, each [rows]."""
        rows, vocab = logits.shape
        chunks = -(-vocab // kernel_sources.CHUNK)
        floats, ids = np.zeros((rows, chunks, 5), np.float32), np.zeros((rows, chunks), np.int32)
        tokens, values = np.zeros(rows, np.int32), np.zeros((rows, 3), np.float32)
        arrays = [logits, inverse, scale, keys, floats, ids, tokens, values]
        self._library.run_draw(*(a.ctypes.data_as(ctypes.c_void_p) for a in arrays), rows, vocab, chunks)
        return tokens, values[:, 0], values[:, 1], values[:, 2]

    def bits_at(self, keys, ids):
        """Noise words at ids [rows, k]."""
        words = np.zeros(ids.shape, np.uint32)
        self._library.run_at(*(a.ctypes.data_as(ctypes.c_void_p) for a in (keys, ids, words)), *ids.shape)
        return words
