// Products of bfloat16 in the matrix unit's tiles; all else as AVX-512 with float32 accumulation does it.
//
// A product of up to 32 rows with one panel fills four tiles of results.  Each result is one chain over k in blocks of
// 32 inputs, whatever rows lie beside it.  The unit takes subnormal numbers for zero.
#include "vec_avx512.h"

#include "dot.h"
#include "tiles.h"

namespace {
template <class S> struct Dot;
template <> struct Dot<uint16_t> : WidenedDot<12, 4> {};
}  // namespace

#include "path.h"

namespace {

constexpr int TILE_INPUTS = TILE_BYTES / 2;
constexpr int64_t PANEL_STRIDE = PANEL * 4;  // bytes from a pair of inputs to the next one in a panel

// Results of all four tiles += rows times 32 inputs of a panel; `second`: there are more than 16 rows.
template <class Tiles>
void step(Tiles& tiles, const char* first, const char* second, int64_t stride, const char* panel) {
  tiles.template load<6>(panel, PANEL_STRIDE);
  tiles.template load<7>(panel + TILE_BYTES, PANEL_STRIDE);
  tiles.template load<4>(first, stride);
  tiles.template dot<0, 4, 6>();
  tiles.template dot<1, 4, 7>();
  if (!second) return;
  tiles.template load<5>(second, stride);
  tiles.template dot<2, 5, 6>();
  tiles.template dot<3, 5, 7>();
}

// The inputs that fill no tile: they and their weights come from copies with zeros behind.
template <class Tiles>
void last_step(Tiles& tiles, const char* a, int64_t stride, int rows, const char* panel, int64_t inputs) {
  alignas(64) char x[2 * TILE_ROWS][TILE_BYTES] = {};
  alignas(64) char weights[TILE_ROWS * PANEL_STRIDE] = {};
  for (int r = 0; r < rows; r++) std::memcpy(x[r], a + r * stride, inputs * 2);
  std::memcpy(weights, panel, (inputs + 1) / 2 * PANEL_STRIDE);
  step(tiles, x[0], rows > TILE_ROWS ? x[TILE_ROWS] : nullptr, TILE_BYTES, weights);
}

template <class Tiles>
void tile_product(const void* a, int64_t stride, int rows, const void* panel, int64_t inputs, float* tile) {
  const char* x = static_cast<const char*>(a);
  const char* weights = static_cast<const char*>(panel);
  const bool more = rows > TILE_ROWS;
  const int64_t bytes = stride * 2, out = PANEL * sizeof(float), whole = inputs / TILE_INPUTS * TILE_INPUTS;
  const TileShapes shapes(more ? TILE_ROWS : rows, more ? rows - TILE_ROWS : 0);
  Tiles tiles;
  tiles.configure(shapes);
  tiles.template zero<0>();
  tiles.template zero<1>();
  if (more) tiles.template zero<2>(), tiles.template zero<3>();
  for (int64_t k = 0; k < whole; k += TILE_INPUTS)
    step(tiles, x + k * 2, more ? x + k * 2 + TILE_ROWS * bytes : nullptr, bytes, weights + k / 2 * PANEL_STRIDE);
  if (whole < inputs)
    last_step(tiles, x + whole * 2, bytes, rows, weights + whole / 2 * PANEL_STRIDE, inputs - whole);
  tiles.template store<0>(tile, out);
  tiles.template store<1>(tile + TILE_ROWS, out);
  if (more) {
    tiles.template store<2>(tile + TILE_ROWS * PANEL, out);
    tiles.template store<3>(tile + TILE_ROWS * PANEL + TILE_ROWS, out);
  }
  tiles.release();
}

template <class Tiles> Arithmetic with_tiles() {
  Arithmetic found = *arithmetic<uint16_t>();
  static_assert(2 * TILE_ROWS <= batchgen::MOST_ROWS);
  found.rows = 2 * TILE_ROWS;
  found.product = tile_product<Tiles>;
  return found;
}

}  // namespace

namespace batchgen {
const Arithmetic* amx_bf16_arithmetic(bool emulated) {
  static const Arithmetic unit = with_tiles<MatrixUnit>(), plain = with_tiles<PlainTiles>();
  return emulated ? &plain : &unit;
}
}  // namespace batchgen
