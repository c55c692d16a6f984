// Eight tiles of 16 rows of 64 bytes, by the processor's matrix unit or in plain C++.
//
// Owns nothing between calls: `configure` comes before all else and `release` ends it, since other libraries use the
// same tiles.  Tiles 0 to 3 hold float32 results, 4 and 5 rows of bfloat16, 6 and 7 pairs of rows of a weight.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of one row

// As the instruction LDTILECFG reads it: how many rows of how many bytes each tile has.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Results and rows of `first` and then of `second` lines, and two whole weight tiles.
  TileShapes(int first, int second) {
    const int lines[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; i++)
      if (lines[i]) rows[i] = static_cast<uint8_t>(lines[i]), bytes[i] = TILE_BYTES;
  }
};
static_assert(sizeof(TileShapes) == 64);

// AMX.  Written as assembly so that no compiler has to know the instructions; it keeps nothing in tiles itself.
struct MatrixUnit {
  void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
  void release() { asm volatile("tilerelease"); }

#define BATCHGEN_TILE(name, instruction)                                                        \
  template <int T> static void name(const void* p, int64_t stride) {                            \
    static_assert(T >= 0 && T < 8);                                                             \
    asm volatile(instruction : : "r"(p), "r"(stride), "i"(T) : "memory");                       \
  }
  BATCHGEN_TILE(load, "tileloadd (%0,%1,1), %%tmm%c2")
  BATCHGEN_TILE(store_to, "tilestored %%tmm%c2, (%0,%1,1)")
#undef BATCHGEN_TILE

  template <int T> void store(float* p, int64_t stride) { store_to<T>(p, stride); }
  template <int T> void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }

  // result[m][n] += sum over pairs k of rows[m][k] * weight[k][n]
  template <int Result, int Rows, int Weight> void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Result), "i"(Rows), "i"(Weight));
  }
};

// The same where there is no such unit: slow, for tests of what is built on it.  Sums are rounded at other places.
struct PlainTiles {
  void configure(const TileShapes& shapes) { shapes_ = &shapes; }
  void release() { shapes_ = nullptr; }

  template <int T> void load(const void* p, int64_t stride) {
    std::memset(tile_[T], 0, sizeof tile_[T]);
    for (int r = 0; r < shapes_->rows[T]; r++)
      std::memcpy(tile_[T][r], static_cast<const char*>(p) + r * stride, shapes_->bytes[T]);
  }
  template <int T> void store(float* p, int64_t stride) {
    for (int r = 0; r < shapes_->rows[T]; r++)
      std::memcpy(reinterpret_cast<char*>(p) + r * stride, tile_[T][r], shapes_->bytes[T]);
  }
  template <int T> void zero() { std::memset(tile_[T], 0, sizeof tile_[T]); }

  template <int Result, int Rows, int Weight> void dot() {
    for (int m = 0; m < shapes_->rows[Result]; m++) {
      float sums[TILE_ROWS];
      std::memcpy(sums, tile_[Result][m], TILE_BYTES);
      for (int k = 0; k < 2 * shapes_->rows[Weight]; k++) {
        const float x = value(tile_[Rows][m], k);
        for (int n = 0; n < TILE_ROWS; n++) sums[n] += x * value(tile_[Weight][k / 2], 2 * n + k % 2);
      }
      std::memcpy(tile_[Result][m], sums, TILE_BYTES);
    }
  }

 private:
  static float value(const char* row, int i) {
    uint16_t half;
    std::memcpy(&half, row + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  const TileShapes* shapes_ = nullptr;
  alignas(64) char tile_[8][TILE_ROWS][TILE_BYTES];
};

}  // namespace
