// From logits to the next token of every row.
//
// The struct is part of the C interface: kernels/native_library.py declares the same fields in the same order.
#pragma once

#include <cstdint>

#include "arithmetic.h"

extern "C" {

// Rows of logits, the parameters of each, and where its results go.
struct bg_sampling {
  int64_t rows, vocabulary;
  int64_t text;               // ids from here on are never chosen or listed; in [1, vocabulary]
  int64_t width;              // of a line of the lists
  const float* logits;        // [rows, vocabulary]
  const uint8_t* greedy;      // [rows]
  const float* temperature;   // [rows], above 0 where not greedy
  const int64_t* top_k;       // [rows], 0: off
  const double* top_p;        // [rows], 1: off
  const double* uniform;      // [rows], in [0, 1)
  const int64_t* listed;      // [rows], most likely ids to list, at most `width`
  int64_t* ids;               // [rows]
  float* logprobs;            // [rows]
  int64_t* top_ids;           // [rows, width]; what is not listed stays
  float* top_logprobs;        // [rows, width]
  uint8_t* bad;               // [rows], 1 where a logit is not finite
};
}

namespace batchgen {

void sample(const Arithmetic& a, int threads, const bg_sampling& sampling);

}  // namespace batchgen
