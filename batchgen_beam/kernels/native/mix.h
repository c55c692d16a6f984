// How values are added up by their shares, whatever a step of that is.  Included by `path.h`; a path's `Dot` says how
// many tokens go in one step, what their values are in vectors, and what a step does.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "near.h"

namespace {

// sums[l] += shares[l][t] * values[t] for t in [begin, end), in ascending order, for V vectors of each of L lines.
// Tokens go D::TOKENS at once, from a multiple of that on: those of a step that are outside count as zeros.
template <class D, int L, int V, class S>
void mix(const typename D::Share* shares, int begin, int end, const S* values, int64_t size, float* const* sums,
         const S* ahead) {
  Vec acc[L][V];
#pragma GCC unroll 8
  for (int l = 0; l < L; l++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[l][v] = load(sums[l] + v * LANES);
  for (int t = begin / D::TOKENS * D::TOKENS; t < end; t += D::TOKENS) {
    if (ahead) fetch(ahead + t * size, D::TOKENS * size * sizeof(S));
    typename D::Value value[V];
    D::template tokens<V>(values + t * size, size, begin - t, end - t, value);
#pragma GCC unroll 8
    for (int l = 0; l < L; l++) {
      const auto share = D::share(shares + l * batchgen::PAGE + t);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[l][v] = D::mixed(acc[l][v], share, value[v]);
    }
  }
#pragma GCC unroll 8
  for (int l = 0; l < L; l++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(sums[l] + v * LANES, acc[l][v]);
}

}  // namespace
