// A [ROWS][COLS] tile of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte
// row accesses are free of bank conflicts without padding.
//
// A row is cut into 16-byte chunks (8 elements). Chunk c of row r is stored at chunk position
// c ^ swizzle(r): eight rows that are read together then cover all 32 banks once.
//   COLS % 64 == 0: rows start at bank 0, so the low three chunk bits are mixed with r % 8.
//   COLS % 64 == 32: rows start at banks 0 and 16 in turn; two bits are mixed with (r / 2) % 4.
#pragma once
#include "../prim/copy.cuh"

template <int ROWS_, int COLS_> struct SmemTile {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLS = COLS_;
  static_assert(COLS % 32 == 0, "SmemTile rows are whole multiples of 64 bytes");
  static constexpr int kChunks = COLS / 8;
  static constexpr int kRowBytes = COLS * 2;
  static constexpr int kBytes = ROWS * kRowBytes;

  // Chunks that a swizzle permutes among themselves: one 128-byte (64-byte) stretch of a row.
  static constexpr int kStretch = COLS % 64 == 0 ? 8 : 4;

  static CUFA2_DEVICE int swizzle(int row) {
    return kStretch == 8 ? row & 7 : (row >> 1) & 3;
  }

  // Byte offset of chunk `chunk` of row `row`. Written so that for a constant chunk only the place
  // within the stretch is computed; the rest becomes part of the instruction.
  static CUFA2_DEVICE u32 offset(int row, int chunk) {
    const int within = (chunk % kStretch) ^ swizzle(row);
    return row * kRowBytes + (within << 4) + chunk / kStretch * kStretch * 16;
  }
};

// A block's copy of a [ROWS][COLS] tile by cp.async. The global tensor is row major with
// `row_stride` elements between rows; rows at or past `rows_left` and columns at or past
// `cols_left` (a multiple of 8) are filled with zeros, so padding never enters a product.
//
// kLanes neighbouring threads take one 128-byte (64-byte) stretch of a row; a thread keeps its
// place within the stretch, so that all its addresses are one pointer per row plus constants.
template <class Smem, int THREADS> struct TileLoader {
  static constexpr int kLanes = Smem::kStretch;
  static constexpr int kRowStep = THREADS / kLanes;
  static constexpr int kSteps = (Smem::ROWS + kRowStep - 1) / kRowStep;
  static_assert(kRowStep % 8 == 0, "a thread's rows share one swizzle");

  template <class T>
  static CUFA2_DEVICE void load(u32 shared, const T* tile, i64 row_stride, int rows_left,
                                int cols_left, int thread) {
    const int row = thread / kLanes, chunk = thread % kLanes;
    const T* source = tile + row * row_stride + chunk * 8;
    u32 target = shared + Smem::offset(row, chunk);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      if (Smem::ROWS % kRowStep != 0 && row + n * kRowStep >= Smem::ROWS) break;
      const bool row_valid = row + n * kRowStep < rows_left;
#pragma unroll
      for (int g = 0; g < Smem::kChunks / kLanes; ++g) {
        cp_async_16(target + g * kLanes * 16, source + g * kLanes * 8,
                    row_valid && (g * kLanes + chunk) * 8 < cols_left);
      }
      source += kRowStep * row_stride;
      target += kRowStep * Smem::kRowBytes;
    }
  }
};
