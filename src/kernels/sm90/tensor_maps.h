// Tensor maps: how the copy engine of Hopper reads q, k, v and dout. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "core/problem.h"

namespace ffpa::sm90 {

// The driver has the encoder of tensor maps.
bool tensor_maps_here();

// Empty, or the sentence that says why the problem's q, k and v cannot be read through tensor maps.
std::string tensor_maps_refuse(const Problem& p);

// The same of one tensor more (dout); `ragged` as for encode_sequences.
std::string tensor_map_refuses(const char* name, const ffpa_tensor& t, bool ragged);

// Sequences have lengths of their own.
bool ragged_q(const Problem& p);
bool ragged_kv(const Problem& p);

// Each makes a map of t [B | 1, H, N | T, D], fp16 or bf16, whose copies are 64 columns by `box_rows` rows, swizzled by 128 bytes; columns
// past D arrive as zeros. False if the driver refuses. Dimensions that repeat (stride 0) have extent 1: see map_step.
//
// Coordinates (column, row, head, batch): for rows past a sequence's end that may hold anything.
bool encode_rows(CUtensorMap* map, const ffpa_tensor& t, int box_rows);
// Coordinates as attn::row_coordinates says: rows past a sequence's end arrive as zeros.
bool encode_sequences(CUtensorMap* map, const ffpa_tensor& t, bool ragged, int box_rows);

// 1, or 0 where the tensor repeats along the axis: the factor of a head's or batch's coordinate.
int map_step(const ffpa_tensor& t, int axis);

// Rows from one batch to the next in the coordinates of a ragged map.
int map_batch_rows(const ffpa_tensor& t);

}  // namespace ffpa::sm90
